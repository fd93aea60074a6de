"""Captions of images: the same of every layout, with labels where asked for, and named where they are wrong."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from mindspeed_mm_dit.cli.request_flags import prompts_of
from mindspeed_mm_dit.configs.images import DatasetParam
from mindspeed_mm_dit.data.rows import Wanted
from mindspeed_mm_dit.data.sources import source_of
from mindspeed_mm_dit.errors import ConfigError, DataError
from mindspeed_mm_dit.wings.scores.demo.caption_phrases import DIGIT_OF, SEEN, UNSEEN, captions_of
from tests.captions_fixtures import CAPTIONS, LAYOUTS, write_beside, write_csv, write_parquet, write_tar


def param_of(folder, found, **more):
    places = found["captions"]
    section = {**found, "captions": tuple(places) if isinstance(places, list) else places, **more}
    return DatasetParam(str(folder), 8, **section)


def opened(folder, found, items=("caption",), checks=(), **more):
    param = param_of(folder, found, **more)
    return source_of(param).open(param, Wanted(items, caption_problems=checks))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_captions_in_all_languages(tmp_path, layout):
    rows = opened(tmp_path / "a", LAYOUTS[layout](tmp_path / "a"))
    numbers = [int(re.findall(r"\d+", path)[-1]) for path in rows.paths]  # (of the image, or of the row)
    assert [own for _, own in sorted(zip(numbers, rows.captions))] == CAPTIONS and set(rows.items) == {"caption"}
    assert rows.classes == () and rows.skipped == 0 and not [note for note in rows.notes if "left out" in note]
    assert rows.subset(np.array([2, 0])).captions == (rows.captions[2], rows.captions[0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_second_look_and_another_caption_are_told_apart(tmp_path, layout):
    found = LAYOUTS[layout](tmp_path / "a")
    first, again = opened(tmp_path / "a", found), opened(tmp_path / "a", found)
    LAYOUTS[layout](tmp_path / "a", [("a two",), *CAPTIONS[1:]])
    other = opened(tmp_path / "a", found)
    assert first.digest == again.digest != other.digest and other.captions != first.captions


def test_folders_are_classes_where_labels_are_asked_for_too(tmp_path):
    rows = opened(tmp_path / "a", write_beside(tmp_path / "a"), ("label", "caption"))
    assert rows.classes == ("first", "second") and rows.labels.tolist() == [0] * 6 + [1] * 6
    assert sorted(rows.captions) == sorted(CAPTIONS)


def test_a_table_without_labels_is_named_where_they_are_asked_for(tmp_path):
    with pytest.raises(DataError, match=r"has the columns \['file_name', 'en', 'de'\](?s:.*)file_name,label,en,de"):
        opened(tmp_path / "a", write_csv(tmp_path / "a"), ("label", "caption"))
    with pytest.raises(DataError, match="column label: is not there"):
        opened(tmp_path / "b", write_parquet(tmp_path / "b"), ("label", "caption"))
    with pytest.raises(DataError, match="its shards hold no images with labels"):
        opened(tmp_path / "c", write_tar(tmp_path / "c"), ("label", "caption"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_missing_caption_is_named_and_can_be_left_out(tmp_path, layout):
    if layout == "lines":
        pytest.skip("an image without a line is no image of the index")
    found = LAYOUTS[layout](tmp_path / "a", [*CAPTIONS[:5], (), *CAPTIONS[6:]])
    with pytest.raises(DataError, match=r"(05.png|row 5) has no caption(?s:.*)1 of 12 images cannot be used") as caught:
        opened(tmp_path / "a", found)
    assert "skip_bad_images" in caught.value.cure
    rows = opened(tmp_path / "a", found, skip_bad_images=True)
    assert len(rows) == 11 and rows.skipped == 1 and sorted(rows.captions) == sorted(CAPTIONS[:5] + CAPTIONS[6:])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "00.png has no caption: 00.txt is empty"),
        (b" \n\r\n ", "00.png has no caption: 00.txt is empty"),
        ("ein Häuschen".encode("latin-1"), "00.png has a caption that is not UTF-8: 00.txt, line 1, byte 0xe4"),
        (b"a\nb\xff", "00.txt, line 2, byte 0xff"),
        ("a cat".encode("utf-16-le"), "00.png has a caption that is no text: 00.txt holds a NUL byte"),
        (b"a " * 2**20, "00.png has a caption in 00.txt, which has 2,097,152 bytes: those are no captions"),
    ],
)
def test_a_file_that_is_no_caption_is_named(tmp_path, content, message):
    found = write_beside(tmp_path / "a")
    (tmp_path / "a/first/00.txt").write_bytes(content)
    with pytest.raises(DataError) as caught:
        opened(tmp_path / "a", found)
    assert message in str(caught.value)


def test_a_file_has_a_caption_a_line_and_a_mark_of_windows_is_none(tmp_path):
    found = write_beside(tmp_path / "a", CAPTIONS[:1])
    (tmp_path / "a/first/00.txt").write_bytes(b"\xef\xbb\xbfa one\r\n\r\n  one moves \r\n")
    assert opened(tmp_path / "a", found).captions == (("a one", "one moves", "一"),)


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85", "\f", "\v", "\x1c", "\x1e", "\r"])
def test_a_line_ends_with_a_line_feed_alone(tmp_path, mark):
    found = write_beside(tmp_path / "a", CAPTIONS[:1])
    (tmp_path / "a/first/00.txt").write_bytes(f"a one{mark}moves\r\na two\n".encode())
    assert opened(tmp_path / "a", found).captions == ((f"a one{mark}moves", "a two", "一"),)
    (tmp_path / "prompts").write_bytes(f"a one{mark}moves\r\na two".encode())
    assert prompts_of([], str(tmp_path / "prompts")) == [f"a one{mark}moves", "a two"]


@pytest.mark.parametrize(
    ("image", "file"),
    [
        ("e\u0301.png", "é.txt"), ("é.png", "e\u0301.txt"), ("a.png", "a.TXT"), ("a.jpg", "a.jpg.txt"),
        ("a.b.png", "a.b.Txt"),
    ],
)  # fmt: skip
def test_a_caption_is_found_by_other_ways_to_write_its_name(tmp_path, image, file):
    write_beside(tmp_path / "b", [("a one",)])
    (tmp_path / "b/first/00.png").rename(tmp_path / "b/first" / image)
    (tmp_path / "b/first/00.txt").rename(tmp_path / "b/first" / file)
    rows = opened(tmp_path / "b", {"captions": ".txt"})
    assert rows.captions == (("a one",),) and not [note for note in rows.notes if "left out" in note]


def test_a_caption_of_another_image_is_not_taken_and_two_are_not_chosen_from(tmp_path):
    found = write_beside(tmp_path / "a", CAPTIONS[:1]) | {"captions": ".txt"}
    place = tmp_path / "a/first"
    (place / "00.png").rename(place / "A.png")
    (place / "00.txt").rename(place / "a.txt")
    with pytest.raises(DataError, match=r"has no caption: there is no A\.txt"):
        opened(tmp_path / "a", found)
    for name in ("A.TXT", "A.Txt"):
        (place / name).write_text("a one")
    with pytest.raises(DataError, match=r"has captions in A\.TXT and in A\.Txt: keep one"):
        opened(tmp_path / "a", found)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "00.json is no JSON object with texts in 'caption'"),
        ("{", "is no JSON object"),
        ('{"caption": "\\ud800"}', "is no JSON object"),
        ('{"caption": 3}', "is no JSON object with texts in 'caption'"),
        ('{"text": "a"}', "00.json is empty"),
    ],
)
def test_json_without_captions_is_named(tmp_path, content, message):
    found = write_beside(tmp_path / "a", CAPTIONS[:1]) | {"captions": ".json:caption"}
    (tmp_path / "a/first/00.json").write_text(content)
    with pytest.raises(DataError) as caught:
        opened(tmp_path / "a", found)
    assert message in str(caught.value)
    (tmp_path / "a/first/00.json").write_text(json.dumps({"caption": "a one"}))
    assert opened(tmp_path / "a", found).captions == (("a one",),)


def test_columns_of_something_else_are_named(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    found = write_parquet(tmp_path / "a") | {"captions": "texts"}
    table = parquet.read_table(tmp_path / "a/train-00000.parquet").set_column(1, "texts", pyarrow.array(range(12)))
    parquet.write_table(table, tmp_path / "a/train-00000.parquet")
    with pytest.raises(DataError, match="row 0 has a texts that is no text: 0"):
        opened(tmp_path / "a", found)
    with pytest.raises(DataError, match=r"column text: is not there(?s:.*)texts"):
        opened(tmp_path / "a", found | {"captions": "text"})


def test_what_the_encoder_cannot_read_is_named_by_image(tmp_path):
    def too_long(captions):
        return ["is too long" if len(caption) > 10 else "" for caption in captions]

    found = write_csv(tmp_path / "a")
    with pytest.raises(DataError, match=r"02.png is too long(?s:.*)3 of 12"):
        opened(tmp_path / "a", found, checks=(too_long,))
    assert len(opened(tmp_path / "a", found, checks=(too_long,), skip_bad_images=True)) == 9


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"captions": "caption"}, "names a column, and a folder without dataset_param.index has none"),
        ({"captions": "caption", "dataset_type": "webdataset"}, "names a column, and a tar has none"),
        ({"captions": "../x.txt"}, "is a path, not the ending of a file beside the image"),
        ({"captions": (".txt", "./x.json:caption")}, "is a path, not the ending of a file beside the image"),
        ({"captions": ".txt", "dataset_type": "parquet"}, "begins with a dot, as the ending of a file does"),
        ({"captions": ("en", ".txt"), "index": "a.csv"}, "begins with a dot"),
        ({"captions": ".json"}, "does not say which key of the JSON object"),
        ({"captions": ()}, "names nothing"),
        ({"captions": ""}, "names nothing"),
        ({"caption_dropout_prob": 1.5}, "caption_dropout_prob = 1.5"),
    ],
)
def test_a_place_that_cannot_be_is_named(section, message):
    with pytest.raises(ConfigError) as caught:
        DatasetParam("a", 8, **section)
    assert message in str(caught.value)


def test_the_embedded_digits_have_captions_of_which_each_names_one_digit(tmp_path):
    param = DatasetParam(
        str(tmp_path / "captioned_digits"), 8, "captions.csv", captions="caption", source="captioned_digits"
    )
    rows = source_of(param).open(param, Wanted(("label", "caption")))
    assert len(rows) == 1797 and {len(set(own)) for own in rows.captions} == {6}
    assert all(DIGIT_OF[caption] == label for own, label in zip(rows.captions, rows.labels) for caption in own)
    used = {caption for own in rows.captions for caption in own}
    assert used == {caption for digit in range(10) for caption in captions_of(digit, SEEN)}
    assert not used & {caption for digit in range(10) for caption in captions_of(digit, UNSEEN)}
    assert {"a handwritten seven", "the number 7", "a digit after six", "an eight"} < used
