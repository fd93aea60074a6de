"""What holds of every input of the readers: one rule for labels, nothing dropped without a number, lines, and requests.

25 examples of each here, 2,000 with --campaign.
"""

from __future__ import annotations

import io
import re
import tarfile
import tempfile
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("hypothesis", reason="pip install hypothesis")
from hypothesis import strategies as st

from mindspeed_mm_dit.data import tar_rows
from mindspeed_mm_dit.data.image_captions import told_by
from mindspeed_mm_dit.data.labels import composed, labels_of
from mindspeed_mm_dit.data.shard_scan import Sought
from mindspeed_mm_dit.errors import ConfigError, DataError
from mindspeed_mm_dit.sampling.request import in_a_list, split_classes
from mindspeed_mm_dit.sampling.request import labels_of as labels_asked

LETTERS = st.characters(blacklist_categories=("Cs", "Cc"))
NAMES = st.one_of(st.text(LETTERS, min_size=1, max_size=6), st.sampled_from(["cat", "Cat", "e\u0301", "é", "7-9"]))
NUMBERS = st.integers(0, 30).map(str)
ODD = st.sampled_from(["01", "1.0", "nan", "-1", "1e3", "1_0"])
WORDS = st.one_of(
    *(st.lists(words, min_size=1, max_size=6) for words in (NUMBERS, NAMES, st.one_of(NUMBERS, NAMES, ODD)))
)
FOLDERS, KEYS = st.sampled_from(["", "d/", "./", "x.y/", "b\\"]), st.sampled_from(["a", "b", "._a", "a.v2", ""])
ENDINGS = st.sampled_from([".png", ".jpg", ".PNG", ".cls", ".json", ".txt", ""])
MEMBERS = st.lists(st.builds("{}{}{}".format, FOLDERS, KEYS, ENDINGS), max_size=12)


def test_labels_are_numbers_or_names_in_order_or_refused(every):
    @every(WORDS, st.randoms(use_true_random=False), few=25)
    def check(words, random):
        try:
            found = labels_of(words, "here", str)
        except DataError:
            with pytest.raises(DataError):
                labels_of(words[::-1], "here", str)
            return
        words = composed(words)
        if all(re.fullmatch(r"-?\d+", word) for word in words):
            assert found.numbers.tolist() == list(map(int, words)) and not found.classes
        else:
            assert found.classes == tuple(sorted(set(words)))
            assert [found.classes[number] for number in found.numbers] == list(words)
        assert labels_of(words[::-1], "here", str).numbers.tolist() == found.numbers.tolist()[::-1]
        kept = random.sample(sorted(set(words)), len(set(words)))
        assert [kept[number] for number in labels_of(words, "here", str, kept=kept).numbers] == list(words)


def grouped(names):
    """The samples that webdataset makes of a tar: key -> endings, in order; None if it refuses the tar."""
    samples: list[tuple[str, list[str]]] = []
    for name in names:
        folder, slash, base = name.rpartition("/")
        parts = re.fullmatch(r"([^.]+)[.](.*)", base)
        if parts is None:
            continue
        key, ending = folder + slash + parts[1], parts[2].lower()
        if not samples or samples[-1][0] != key:
            samples.append((key, []))
        if ending in samples[-1][1]:
            return None
        samples[-1][1].append(ending)
    return samples


def test_tar_is_grouped_as_webdataset_does(every):
    @every(MEMBERS, few=25)
    def check(names):
        names = [name for name in names if name.rpartition("/")[2]]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "a.tar"
            with tarfile.open(path, "w") as archive:
                for name in names:
                    member = tarfile.TarInfo(name)
                    member.size = len(name.encode())
                    archive.addfile(member, io.BytesIO(name.encode()))
            samples = grouped(names)
            if samples is None:
                with pytest.raises(DataError, match="stands twice in one sample"):
                    tar_rows.scan(path, Sought())
                return
            found = tar_rows.scan(path, Sought())
        whole = [key for key, endings in samples if {"png", "jpg"} & set(endings) and "cls" in endings]
        assert [label.rpartition("/")[2].partition(".")[0] for label in found.labels] == [
            key.rpartition("/")[2] for key in whole
        ]
        assert 2 * len(whole) + sum(found.left_out.values()) == len(names), Counter(names)


def test_a_caption_is_a_line_whatever_stands_in_it(every):
    letters = st.characters(blacklist_categories=("Cs",), blacklist_characters="\n\0\ufeff")

    @every(st.lists(st.text(letters, max_size=8)), st.sampled_from(["\n", "\r\n"]), few=25)
    def check(lines, end):
        told = told_by("a.txt", end.join(lines).encode(), ".txt")
        assert list(told.captions) == [line.strip() for line in lines if line.strip()]


def test_classes_written_in_a_list_are_those_asked_for(every):
    names = st.text(LETTERS, min_size=1, max_size=5).filter(str.strip)
    odd = st.sampled_from(["7-9", "a, b", '"', 'a",b', '"a"', " edge ", "0-1", ","])
    classes = st.lists(st.one_of(names, odd, NUMBERS), min_size=1, max_size=12, unique_by=lambda name: composed([name]))

    @every(classes, few=25)
    def check(classes):
        names = composed(classes)
        quoted = ['"' + name.replace('"', '""') + '"' for name in names if f'"{name}"' not in names]
        assert [names[label] for label in labels_asked(quoted, names, 12)] == [
            name for name in names if f'"{name}"' not in names
        ]
        try:
            asked = labels_asked(split_classes(",".join(map(in_a_list, names)), names), names, 12)
        except ConfigError as error:
            assert "is the name of label" in str(error)
        else:
            assert asked == list(range(len(names)))
