from __future__ import annotations

import json

import pytest

from mindspeed_mm_dit.data.annotation import Line, UnusableEntry, entry_of, read_annotation
from mindspeed_mm_dit.errors import DataError

OF_THE_TUTORIAL = """\
[
    {
        "path": "./videos/video000001.mp4",
        "cap": "A scenic view of mountains during sunrise.",
        "num_frames": 81,
        "fps": 24,
        "resolution": %s
    },
    {
        "path": "./videos/video000002.mp4",
        "cap": "A bustling city street with people walking and cars passing by.",
        "num_frames": 81,
        "fps": 24,
        "resolution": %s
    }
]
"""


def entries(path):
    return [entry_of(line) for line in read_annotation(path)]


def test_the_tutorials_annotation_is_read_with_its_lines(tmp_path):
    path = tmp_path / "annotation.json"
    path.write_text(OF_THE_TUTORIAL % ("[480, 832]", '{"height": 480, "width": 832}'))
    first, second = entries(path)
    assert first == (
        2,
        "videos/video000001.mp4",
        ("A scenic view of mountains during sunrise.",),
        81,
        24,
        (480, 832),
        None,
    )
    assert (second.line, second.path, second.size) == (9, "videos/video000002.mp4", (480, 832))


def test_the_resolution_that_the_tutorial_prints_is_named_with_its_cure(tmp_path):
    path = tmp_path / "annotation.json"
    path.write_text(OF_THE_TUTORIAL % ("[480, 832]", "{480, 832}"))
    with pytest.raises(DataError, match=r"line 14: is not JSON: \{480, 832\} is.*\n.*\"resolution\": \[480"):
        read_annotation(path)


def test_a_jsonl_has_an_object_a_line_and_blank_lines(tmp_path):
    path = tmp_path / "clips.jsonl"
    path.write_text('{"path": "a.mp4", "cap": ["one", "two"]}\n\n{"path": "b.png", "cap": "three"}\n')
    assert entries(path) == [(1, "a.mp4", ("one", "two"), *[None] * 4), (3, "b.png", ("three",), *[None] * 4)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"path": "a"}, ...]', "line 1: is not JSON"),
        ('[\n{"path": "a"}\n{"path": "b"}]', "line 3: is not JSON: Expecting ',' or ']'"),
        ('{"path": "a"}', "line 1: is not JSON: the annotation is no list"),
        ('[{"path": "a"}', "line 1: is not JSON"),
        ('[\n{"path": "a"}]\n[{"path": "b"}]', "line 3: is not JSON: there is more after the end of the list"),
        ('[{"path": "a"},\n]', "line 2: is not JSON: there is a comma behind the last object"),
        ('[\n{"path": "a", "cap": "b", "cap": "c"}]', "is not JSON: the key 'cap' stands twice in one object"),
        ("[" * 100_000, "line 1: is not JSON: maximum recursion"),
        ("[]", "lists no clips"),
    ],
)
def test_what_is_no_list_is_named_with_its_line(tmp_path, text, message):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError, match=message.replace("[", r"\[")):
        read_annotation(tmp_path / "a.json")


def test_an_object_a_line_is_said_to_be_a_jsonl(tmp_path):
    (tmp_path / "a.json").write_text('{"path": "a", "cap": "b"}\n{"path": "c", "cap": "d"}\n')
    with pytest.raises(DataError, match=r"one object a line is a \.jsonl"):
        read_annotation(tmp_path / "a.json")


def test_a_caption_under_another_key_is_told_from_none():
    with pytest.raises(UnusableEntry, match=r"which is its key cap; its keys are \['path', 'caption'\]"):
        entry_of(Line(1, {"path": "a.mp4", "caption": "a dog"}))


def test_a_jsonl_that_is_cut_is_named_with_its_line(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"path": "a", "cap": "b"}\n{"path": "a", "ca')
    with pytest.raises(DataError, match="line 2: is not JSON"):
        read_annotation(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": None}, "has no path"),
        ({"path": "../a.mp4"}, "leaves dataset_param.data_folder"),
        ({"path": "/a.mp4"}, "leaves dataset_param.data_folder"),
        ({"cap": None}, "has no caption"),
        ({"cap": []}, "has no caption"),
        ({"cap": " "}, "has the caption ' ', which is none"),
        ({"cap": ["a", 1]}, "has the caption"),
        ({"num_frames": 0}, "num_frames = 0"),
        ({"num_frames": True}, "num_frames = True"),
        ({"fps": "24"}, "fps = '24'"),
        ({"fps": float("nan")}, "fps = nan"),
        ({"resolution": {"height": 480}}, r"write \[height, width\]"),
        ({"resolution": [480]}, r"write \[height, width\]"),
        ({"resolution": [480, 0]}, r"write \[height, width\]"),
        ({"resolution": "480x832"}, r"write \[height, width\]"),
        ({"cut": [0, 81]}, "has the key cut"),
        ({"crop": [0, 10, 0, 10]}, "has the key crop"),
    ],
)
def test_an_entry_that_names_no_clip_says_why(changes, message):
    content = {"path": "a.mp4", "cap": "a", "num_frames": 9, "fps": 24, "resolution": [4, 4]}
    assert entry_of(Line(1, content)).size == (4, 4)
    with pytest.raises(UnusableEntry, match=message):
        entry_of(Line(1, content | changes))


def test_lines_are_right_however_the_list_is_written(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("\n\n" + json.dumps([{"path": f"{n}"} for n in range(3)], indent=2))
    assert [line.line for line in read_annotation(path)] == [4, 7, 10]
    path.write_text('[\n{"path": "a"},\n{"path": "b"}, {"path": "c"},\n\n{"path": "d"}]')
    assert [line.line for line in read_annotation(path)] == [2, 3, 3, 5]


@pytest.mark.parametrize("label", [None, -1, " ", 1.5, True, 10**30])
def test_a_label_is_a_number_or_a_name(label):
    with pytest.raises(UnusableEntry, match=r"has kind = .*: a label is a number from 0 on, or a name"):
        entry_of(Line(1, {"path": "a.mp4", "kind": label}), captioned=False, label_key="kind")
    found = entry_of(Line(1, {"path": "a.mp4", "kind": "dog"}), captioned=False, label_key="kind")
    assert (found.label, found.captions) == ("dog", ())
