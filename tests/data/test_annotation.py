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
    path = tmp_path / "clips.jsonl"  # an object a line
    path.write_text('{"path": "a.mp4", "cap": ["one", "two"]}\n\n{"path": "b.png", "cap": "three"}\n')
    assert entries(path) == [(1, "a.mp4", ("one", "two"), *[None] * 4), (3, "b.png", ("three",), *[None] * 4)]


@pytest.mark.parametrize(("text", "words"), [
    ('[{"path": "a"}, ...]', "line 1"),
    ('[\n{"path": "a"}\n{"path": "b"}]', "line 3"),
    ('[\n{"path": "a",\n"resolution": {480, 832}}]', "line 3.*{480, 832}"),  # as a tutorial has it
    ('{"path": "a"}', "line 1"),
    ('[{"path": "a"}', "line 1"),
    ('[\n{"path": "a"}]\n[{"path": "b"}]', "line 3"),
    ('[{"path": "a"},\n]', "line 2"),
    ('[\n{"path": "a", "cap": "b", "cap": "c"}]', "'cap'"),
    ("[" * 100_000, "line 1"),
    ('{"path": "a", "cap": "b"}\n{"path": "c", "cap": "d"}\n', ".jsonl"),
    ('{"path": "a", "cap": "b"}\n{"path": "a", "ca', "line 2"),
    ("[]", "no clips"),
])  # fmt: skip
def test_unreadable_list_is_refused_with_its_line(tmp_path, text, words):
    path = tmp_path / ("a.jsonl" if text.endswith('"ca') else "a.json")
    path.write_text(text)
    pytest.raises(DataError, read_annotation, path).match(words)


@pytest.mark.parametrize(("key", "values", "words"), [
    ("path", [None], "path"),
    ("path", ["../a.mp4", "/a.mp4"], "dataset_param.data_folder"),
    ("cap", [None, [], " ", ["a", 1]], "caption"),
    ("num_frames", [0, True], "num_frames = "),
    ("fps", ["24", float("nan")], "fps = "),
    ("resolution", [{"height": 480}, [480], [480, 0], "480x832"], "resolution"),
    ("cut", [[0, 81]], "cut"),
    ("crop", [[0, 10, 0, 10]], "crop"),
    ("kind", [None, -1, " ", 1.5, True, 10**30], "kind = "),
])  # fmt: skip
def test_unusable_entry_is_refused(key, values, words):
    content = {"path": "a.mp4", "cap": "a", "num_frames": 9, "fps": 24, "resolution": [4, 4], "kind": "dog"}
    entry = parse_entry(AnnotationLine(1, content), label_key="kind")
    assert (entry.size, entry.label) == ((4, 4), "dog")
    assert parse_entry(AnnotationLine(1, content), captioned=False, label_key="kind").captions == ()
    for value in values:
        with pytest.raises(UnusableEntry, match=words):
            parse_entry(AnnotationLine(1, content | {key: value}), label_key="kind")
