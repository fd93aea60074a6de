"""What holds of every input of the readers: 25 examples of each here, 2,000 with --campaign."""

import pytest

pytest.importorskip("hypothesis", reason="pip install hypothesis")
from hypothesis import strategies as st

from mindspeed_mm_dit.data.captions import parse_caption_file
from mindspeed_mm_dit.data.labels import normalize_names
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.sampling.conditions import labels_of as labels_asked
from mindspeed_mm_dit.sampling.conditions import quote_class_name, split_classes

LETTERS = st.characters(blacklist_categories=("Cs", "Cc"))
NAMES = st.one_of(st.text(LETTERS, min_size=1, max_size=6), st.sampled_from(["cat", "Cat", "e\u0301", "é", "7-9"]))
NUMBERS = st.integers(0, 30).map(str)


def test_a_caption_is_a_line_whatever_stands_in_it(every):
    letters = st.characters(blacklist_categories=("Cs",), blacklist_characters="\n\0\ufeff")

    @every(st.lists(st.text(letters, max_size=8)), st.sampled_from(["\n", "\r\n"]), few=25)
    def check(lines, end):
        told = parse_caption_file("a.txt", end.join(lines).encode(), ".txt")
        assert list(told.captions) == [line.strip() for line in lines if line.strip()]


def test_classes_written_in_a_list_are_those_asked_for(every):
    names = st.text(LETTERS, min_size=1, max_size=5).filter(str.strip)
    odd = st.sampled_from(["7-9", "a, b", '"', 'a",b', '"a"', " edge ", "0-1", ","])
    classes = st.lists(
        st.one_of(names, odd, NUMBERS), min_size=1, max_size=12, unique_by=lambda name: normalize_names([name])
    )

    @every(classes, few=25)
    def check(classes):
        names = normalize_names(classes)
        quoted = ['"' + name.replace('"', '""') + '"' for name in names if f'"{name}"' not in names]
        assert [names[label] for label in labels_asked(quoted, names, 12)] == [
            name for name in names if f'"{name}"' not in names
        ]
        try:
            asked = labels_asked(split_classes(",".join(map(quote_class_name, names)), names), names, 12)
        except ConfigError as error:
            assert "is the name of label" in str(error)
        else:
            assert asked == list(range(len(names)))
