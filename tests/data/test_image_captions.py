"""Captions of images: the same of every layout, with labels where asked for, and named where they are wrong."""

import re

import numpy as np
import pytest

from mindspeed_mm_dit.configs.images import DatasetParam
from mindspeed_mm_dit.data.captions import parse_caption_file
from mindspeed_mm_dit.data.sources import SourceRequest, source_of
from mindspeed_mm_dit.errors import ConfigError, DataError
from mindspeed_mm_dit.sampling.conditions import read_prompts
from mindspeed_mm_dit.tools.evaluate.demo import DIGIT_OF, SEEN, UNSEEN, captions_of
from tests.captions_fixtures import CAPTIONS, LAYOUTS, write_beside, write_csv, write_parquet, write_tar


def param_of(folder, found, **more):
    places = found["captions"]
    section = {**found, "captions": tuple(places) if isinstance(places, list) else places, **more}
    return DatasetParam(str(folder), 8, **section)


def opened(folder, found, items=("caption",), checks=(), **more):
    param = param_of(folder, found, **more)
    return source_of(param).open(param, SourceRequest(items, caption_problems=checks))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_captions(tmp_path, layout):
    found = LAYOUTS[layout](tmp_path / "a")
    rows, again = opened(tmp_path / "a", found), opened(tmp_path / "a", found)
    numbers = [int(re.findall(r"\d+", path)[-1]) for path in rows.paths]  # (of the image, or of the row)
    assert [own for _, own in sorted(zip(numbers, rows.captions))] == CAPTIONS and set(rows.items) == {"caption"}
    assert rows.classes == () and rows.skipped == 0 and not [note for note in rows.notes if "left out" in note]
    assert rows.subset(np.array([2, 0])).captions == (rows.captions[2], rows.captions[0])
    LAYOUTS[layout](tmp_path / "a", [("a two",), *CAPTIONS[1:]])
    other = opened(tmp_path / "a", found)
    assert rows.digest == again.digest != other.digest and other.captions != rows.captions


def test_labels_and_captions_are_asked_for_together(tmp_path):
    rows = opened(tmp_path / "a", write_beside(tmp_path / "a"), ("label", "caption"))
    assert rows.classes == ("first", "second") and rows.labels.tolist() == [0] * 6 + [1] * 6
    assert sorted(rows.captions) == sorted(CAPTIONS)
    for write, words in ((write_csv, "'file_name', 'en', 'de'"), (write_parquet, "label"), (write_tar, "labels")):
        with pytest.raises(DataError, match=words):
            opened(tmp_path / write.__name__, write(tmp_path / write.__name__), ("label", "caption"))


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "lines"])  # (of which no line is no image)
def test_missing_caption_is_refused_or_left_out(tmp_path, layout):
    found = LAYOUTS[layout](tmp_path / "a", [*CAPTIONS[:5], (), *CAPTIONS[6:]])
    with pytest.raises(DataError, match=r"1 of 12 images.* (/.*/05.png|/.*: row 5) has no caption.*skip_bad_images"):
        opened(tmp_path / "a", found)
    rows = opened(tmp_path / "a", found, skip_bad_images=True)
    assert len(rows) == 11 and rows.skipped == 1 and sorted(rows.captions) == sorted(CAPTIONS[:5] + CAPTIONS[6:])


@pytest.mark.parametrize(("ending", "content", "message"), [
    (".txt", b"", "00.txt is empty"),
    (".txt", b" \n\r\n ", "00.txt is empty"),
    (".txt", "ein Häuschen".encode("latin-1"), "00.txt, line 1, byte 0xe4"),
    (".txt", b"a\nb\xff", "00.txt, line 2, byte 0xff"),
    (".txt", "a cat".encode("utf-16-le"), "NUL"),
    (".txt", b"a " * 2**20, "2,097,152 bytes"),
    (".json", b"[]", "00.json is not a JSON object with texts in 'caption'"),
    (".json", b"{", "00.json is not a JSON object"),
    (".json", b'{"caption": "\\ud800"}', "00.json is not a JSON object"),
    (".json", b'{"caption": 3}', "00.json is not a JSON object with texts in 'caption'"),
    (".json", b'{"text": "a"}', "00.json is empty"),
])  # fmt: skip
def test_file_that_is_no_caption_is_refused(tmp_path, ending, content, message):
    found = write_beside(tmp_path / "a", CAPTIONS[:1]) | {"captions": ending + ":caption" * (ending == ".json")}
    (tmp_path / f"a/first/00{ending}").write_bytes(content)
    pytest.raises(DataError, opened, tmp_path / "a", found).match(f"00.png.*{message}")
    (tmp_path / f"a/first/00{ending}").write_bytes(b'{"caption": "a one"}' if ending == ".json" else b"a one")
    assert opened(tmp_path / "a", found).captions == (("a one",),)


def test_column_of_no_text_is_refused(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    found = write_parquet(tmp_path / "a") | {"captions": "texts"}
    table = parquet.read_table(tmp_path / "a/train-00000.parquet").set_column(1, "texts", pyarrow.array(range(12)))
    parquet.write_table(table, tmp_path / "a/train-00000.parquet")
    for column, words in (("texts", "row 0 has a texts"), ("text", "column text")):
        pytest.raises(DataError, opened, tmp_path / "a", found | {"captions": column}).match(words)


def test_line_ends_with_a_line_feed_alone(tmp_path):
    found = write_beside(tmp_path / "a", CAPTIONS[:1])
    for mark in ("\u2028", "\u2029", "\x85", "\f", "\v", "\x1c", "\x1e", "\r"):
        (tmp_path / "a/first/00.txt").write_bytes(f"\ufeffa one{mark}moves\r\n\r\n  a two \n".encode())
        assert opened(tmp_path / "a", found).captions == ((f"a one{mark}moves", "a two", "一"),)
        (tmp_path / "prompts").write_bytes(f"a one{mark}moves\r\na two".encode())
        assert read_prompts("--prompts", str(tmp_path / "prompts")) == [f"a one{mark}moves", "a two"]


@pytest.mark.parametrize(("image", "file"), [
    ("e\u0301.png", "é.txt"), ("é.png", "e\u0301.txt"), ("a.png", "a.TXT"), ("a.jpg", "a.jpg.txt"),
    ("a.b.png", "a.b.Txt"),
])  # fmt: skip
def test_caption_is_found_by_other_ways_to_write_its_name(tmp_path, image, file):
    write_beside(tmp_path / "b", [("a one",)])
    (tmp_path / "b/first/00.png").rename(tmp_path / "b/first" / image)
    (tmp_path / "b/first/00.txt").rename(tmp_path / "b/first" / file)
    rows = opened(tmp_path / "b", {"captions": ".txt"})
    assert rows.captions == (("a one",),) and not [note for note in rows.notes if "left out" in note]


def test_caption_of_another_image_and_two_captions_are_refused(tmp_path):
    found = write_beside(tmp_path / "a", CAPTIONS[:1]) | {"captions": ".txt"}
    place = tmp_path / "a/first"
    (place / "00.png").rename(place / "A.png")
    (place / "00.txt").rename(place / "a.txt")
    pytest.raises(DataError, opened, tmp_path / "a", found).match(r"A\.txt")
    for name in ("A.TXT", "A.Txt"):
        (place / name).write_text("a one")
    pytest.raises(DataError, opened, tmp_path / "a", found).match(r"in A\.TXT and in A\.Txt")


@pytest.mark.parametrize(("section", "message"), [
    ({"captions": "caption"}, "a folder without dataset_param.index has none"),
    ({"captions": "caption", "dataset_type": "webdataset"}, "a tar has none"),
    ({"captions": "../x.txt"}, "is a path"),
    ({"captions": (".txt", "./x.json:caption")}, "is a path"),
    ({"captions": ".txt", "dataset_type": "parquet"}, "is a file ending, but Parquet has columns"),
    ({"captions": ("en", ".txt"), "index": "a.csv"}, "mixes columns with file endings"),
    ({"captions": ".json"}, "does not name a key"),
    ({"captions": ()}, "names nothing"),
    ({"captions": ""}, "names nothing"),
    ({"caption_dropout_prob": 1.5}, "caption_dropout_prob = 1.5"),
])  # fmt: skip
def test_impossible_captions_setting_is_refused(section, message):
    pytest.raises(ConfigError, DatasetParam, "a", 8, **section).match(message)


@pytest.mark.extended
def test_captions_of_the_embedded_digits_name_one_digit_each(tmp_path):
    place = str(tmp_path / "captioned_digits")
    section = {"captions": "caption", "source": "captioned_digits", "index": "captions.csv"}
    rows = opened(place, section, ("label", "caption"))
    assert len(rows) == 1797 and {len(set(own)) for own in rows.captions} == {6}
    assert all(DIGIT_OF[caption] == label for own, label in zip(rows.captions, rows.labels) for caption in own)
    used = {caption for own in rows.captions for caption in own}
    assert used == {caption for digit in range(10) for caption in captions_of(digit, SEEN)}
    assert not used & {caption for digit in range(10) for caption in captions_of(digit, UNSEEN)}


def test_a_caption_is_a_line_whatever_stands_in_it(every):
    from hypothesis import strategies as st

    letters = st.characters(blacklist_categories=("Cs",), blacklist_characters="\n\0\ufeff")

    @every(st.lists(st.text(letters, max_size=8)), st.sampled_from(["\n", "\r\n"]), few=25)
    def check(lines, end):
        told = parse_caption_file("a.txt", end.join(lines).encode(), ".txt")
        assert list(told.captions) == [line.strip() for line in lines if line.strip()]
