import pytest

from mindspeed_mm_dit.data.annotation import AnnotationLine, UnusableEntry, parse_entry, read_annotation
from mindspeed_mm_dit.errors import DataError


def entries(path):
    return [parse_entry(line) for line in read_annotation(path)]


def test_annotation_is_read_with_its_lines(tmp_path):
    path = tmp_path / "annotation.json"
    path.write_text(
        '[\n{"path": "./v/1.mp4", "cap": "A view.", "num_frames": 81, "fps": 24,\n"resolution": [480, 832]},\n'
        '{"path": "./v/2.mp4", "cap": "A street.", "resolution": {"height": 480, "width": 832}}\n]'
    )
    first, second = entries(path)
    assert first == (2, "v/1.mp4", ("A view.",), 81, 24, (480, 832), None)
    assert (second.line, second.path, second.size) == (4, "v/2.mp4", (480, 832))
    path.write_text('\n[\n{"path": "a"},\n{"path": "b"}, {"path": "c"},\n\n{"path": "d"}]')
    assert [line.line for line in read_annotation(path)] == [3, 4, 4, 6]


def test_jsonl_has_an_object_per_line(tmp_path):
    path = tmp_path / "clips.jsonl"
    path.write_text('{"path": "a.mp4", "cap": ["one", "two"]}\n\n{"path": "b.png", "cap": "three"}\n')
    assert entries(path) == [(1, "a.mp4", ("one", "two"), *[None] * 4), (3, "b.png", ("three",), *[None] * 4)]


@pytest.mark.parametrize(("text", "message"), [
    ('[{"path": "a"}, ...]', "line 1: is not JSON"),
    ('[\n{"path": "a"}\n{"path": "b"}]', "line 3: is not JSON"),
    ('[\n{"path": "a",\n"resolution": {480, 832}}]', "line 3: is not JSON: {480, 832} is"),  # as a tutorial has it
    ('{"path": "a"}', "line 1: is not JSON: Expecting ["),
    ('[{"path": "a"}', "line 1: is not JSON"),
    ('[\n{"path": "a"}]\n[{"path": "b"}]', "line 3: is not JSON: Expecting the end of the file"),
    ('[{"path": "a"},\n]', "line 2: is not JSON: Expecting value"),
    ('[\n{"path": "a", "cap": "b", "cap": "c"}]', "the key 'cap' occurs twice"),
    ("[" * 100_000, "line 1: is not JSON: maximum recursion"),
    ('{"path": "a", "cap": "b"}\n{"path": "c", "cap": "d"}\n', "is a .jsonl"),
    ("[]", "lists no clips"),
])  # fmt: skip
def test_unreadable_list_is_refused_with_its_line(tmp_path, text, message):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError) as caught:
        read_annotation(tmp_path / "a.json")
    assert message in str(caught.value)


def test_cut_jsonl_is_refused_with_its_line(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"path": "a", "cap": "b"}\n{"path": "a", "ca')
    with pytest.raises(DataError, match="line 2: is not JSON"):
        read_annotation(tmp_path / "a.jsonl")


@pytest.mark.parametrize(("changes", "message"), [
    ({"path": None}, "has no path"),
    ({"path": "../a.mp4"}, "leaves dataset_param.data_folder"),
    ({"path": "/a.mp4"}, "leaves dataset_param.data_folder"),
    ({"cap": None}, "has no caption"),
    ({"cap": []}, "has no caption"),
    ({"cap": " "}, "has the caption ' '"),
    ({"cap": ["a", 1]}, "has the caption"),
    ({"num_frames": 0}, "num_frames = 0"),
    ({"num_frames": True}, "num_frames = True"),
    ({"fps": "24"}, "fps = '24'"),
    ({"fps": float("nan")}, "fps = nan"),
    ({"resolution": {"height": 480}}, "resolution"),
    ({"resolution": [480]}, "resolution"),
    ({"resolution": [480, 0]}, "resolution"),
    ({"resolution": "480x832"}, "resolution"),
    ({"cut": [0, 81]}, "cut"),
    ({"crop": [0, 10, 0, 10]}, "crop"),
])  # fmt: skip
def test_unusable_entry_is_refused(changes, message):
    content = {"path": "a.mp4", "cap": "a", "num_frames": 9, "fps": 24, "resolution": [4, 4]}
    assert parse_entry(AnnotationLine(1, content)).size == (4, 4)
    with pytest.raises(UnusableEntry, match=message):
        parse_entry(AnnotationLine(1, content | changes))


def test_label_is_a_number_or_a_name():
    for label in (None, -1, " ", 1.5, True, 10**30):
        with pytest.raises(UnusableEntry, match=r"has kind = "):
            parse_entry(AnnotationLine(1, {"path": "a.mp4", "kind": label}), captioned=False, label_key="kind")
    found = parse_entry(AnnotationLine(1, {"path": "a.mp4", "kind": "dog"}), captioned=False, label_key="kind")
    assert (found.label, found.captions) == ("dog", ())
