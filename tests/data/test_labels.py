"""One rule for labels in every source: whole numbers are the labels, names are numbered, and a mix is refused."""

import csv
import io
import json

import numpy as np
import pytest
from PIL import Image

from mindspeed_mm_dit.configs.images import ClipsParam, DatasetParam
from mindspeed_mm_dit.data.labels import normalize_names
from mindspeed_mm_dit.data.sources import SourceRequest, source_of
from mindspeed_mm_dit.errors import ConfigError, DataError
from mindspeed_mm_dit.sampling.conditions import labels_of as labels_asked
from mindspeed_mm_dit.sampling.conditions import quote_class_name, split_classes
from tests.data.test_sharded import write_tar


def png(number):
    """An image whose red is ``number``."""
    content = io.BytesIO()
    Image.new("RGB", (8, 8), (number, 0, 0)).save(content, "PNG")
    return content.getvalue()


def of_folders(folder, words):
    for number, word in enumerate(words):
        (folder / word).mkdir(exist_ok=True)
        (folder / word / f"{number}.png").write_bytes(png(number))
    return DatasetParam(str(folder), 8)


def of_csv(folder, words):
    for number in range(len(words)):
        (folder / f"{number}.png").write_bytes(png(number))
    with open(folder / "labels.csv", "w", newline="", encoding="utf-8") as file:
        rows = [(f"{number}.png", word) for number, word in enumerate(words)]
        csv.writer(file).writerows([("image_path", "label"), *rows])
    return DatasetParam(str(folder), 8, index="labels.csv")


def of_tars(folder, words):
    """Each sample in a shard of its own."""
    for number, word in enumerate(words):
        write_tar(folder / f"{number:02d}.tar", [("x", {".cls": word.encode(), ".png": png(number)})])
    return DatasetParam(str(folder), 8, dataset_type="webdataset")


def of_parquets(folder, words, listed=None):
    """The same; ``listed``: for each shard the names in the hub's features, of which the label is a number."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    for number, word in enumerate(words):
        names = listed[number] if listed else None
        table = pyarrow.table({"image": [png(number)], "label": [names.index(word) if names else word]})
        if names:
            by_number = {str(label): name for label, name in sorted(enumerate(names), reverse=True)}
            kind = {"info": {"features": {"label": {"names": by_number if number else names}}}}  # a list, or an object
            table = table.replace_schema_metadata({"huggingface": json.dumps(kind)})
        parquet.write_table(table, folder / f"{number:02d}.parquet")
    return DatasetParam(str(folder), 8, dataset_type="parquet")


def of_clips(folder, words):
    for number in range(len(words)):
        (folder / f"{number}.png").write_bytes(png(number))
    entries = [{"path": f"{number}.png", "kind": word} for number, word in enumerate(words)]
    (folder / "clips.json").write_text(json.dumps(entries))
    return ClipsParam(str(folder), str(folder / "clips.json"), 1, 8, 8, label_key="kind")


SOURCES = {"folders": of_folders, "csv": of_csv, "tars": of_tars, "parquets": of_parquets, "clips": of_clips}


def opened(param, num_classes=None, classes=()):
    return source_of(param).open(param, SourceRequest(("label",), num_classes, classes=classes))


def labels_by_image(param, rows):
    pixels = source_of(param).visuals(rows, param, 3).read(np.arange(len(rows)), np.zeros(len(rows))).arrays["pixels"]
    return dict(sorted(zip(pixels.reshape(len(rows), -1).max(1).tolist(), rows.labels.tolist())))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("words", "numbers", "classes"), [
    (["10", "2", "0", "1"], [10, 2, 0, 1], tuple(map(str, range(11)))),
    (["03", "1", "2"], [3, 1, 2], ("0", "1", "2", "3")),
    (["dog", "cat", "class 10", "class 9"], [3, 0, 1, 2], ("cat", "class 10", "class 9", "dog")),
    (["e\u0301lan", "zebra", "2024_01"], [2, 1, 0], ("2024_01", "zebra", "élan")),
])  # fmt: skip
def test_numbers_are_labels_and_names_are_numbered_everywhere(tmp_path, source, words, numbers, classes):
    rows = opened(param := SOURCES[source](tmp_path, words))
    assert rows.classes == classes and labels_by_image(param, rows) == dict(enumerate(numbers))


@pytest.mark.parametrize("source", SOURCES)
def test_labels_that_are_none_are_refused_by_every_source(tmp_path, source):
    for words, classes, problem in (
        (["0", "cat", "2", "10"], None, "label 'cat'.*3 of 4 labels are numbers"),
        (["cat", "dog", "7"], None, "label '7'.*2 of 3 labels are names"),
        (["0.0", "1.0"], None, "label '0.0'.*neither"),
        (["cat", "nan"], None, "label 'nan'.*neither"),
        (["1e3", "cat"], None, "label '1e3'.*neither"),
        (["1", "3", "2"], 3, r"label 3.* 0 \.\.\. 2\b"),
        (["-1"], None, r"label -1.* 0 \.\.\. 999999\b"),
        (["cat", "dog", "bird"], 2, "class dog.*bird, cat, dog.* 2"),
    ):
        (place := tmp_path / problem[:10]).mkdir()
        pytest.raises(DataError, opened, SOURCES[source](place, words), classes).match(f"{place}.*{problem}")


@pytest.mark.parametrize("source", SOURCES)
def test_resumed_run_or_cache_keeps_the_numbers_of_names(tmp_path, source):
    words = ["0", "1", "2", "10"]
    rows = opened(param := SOURCES[source](tmp_path, words), 4, classes=("0", "1", "10", "2"))
    assert labels_by_image(param, rows) == {0: 0, 1: 1, 2: 3, 3: 2} and rows.classes == ("0", "1", "10", "2")
    assert [note for note in rows.notes if "keep the numbers they had: '10' is label 2" in note]
    assert opened(param, classes=("0", "1", "10")).classes == tuple(map(str, range(11)))
    cached = source_of(param).as_listed(param, rows)
    assert cached.classes == rows.classes and cached.labels.tolist() == rows.labels.tolist()


def test_names_that_shards_number_differently_are_one_class(tmp_path):
    listed = [["cat", "dog", "emu"], ["emu", "cat", "dog"], ["dog", "fox"]]
    rows = opened(param := of_parquets(tmp_path, ["dog", "dog", "fox"], listed))
    assert rows.classes == ("cat", "dog", "emu", "fox") and labels_by_image(param, rows) == {0: 1, 1: 1, 2: 3}
    for word in (1, "owl"):
        param = of_parquets(tmp_path, ["dog", word], [["cat", "dog"], None])
        pytest.raises(DataError, opened, param).match(r"01\.parquet.*row 0.*cat, dog")


def test_classes_written_in_a_list_are_those_asked_for(every):
    from hypothesis import strategies as st

    names = st.text(st.characters(blacklist_categories=("Cs", "Cc")), min_size=1, max_size=5).filter(str.strip)
    odd = st.sampled_from(["7-9", "a, b", '"', 'a",b', '"a"', " edge ", "0-1", ","])
    some = st.one_of(names, odd, st.integers(0, 30).map(str))
    classes = st.lists(some, min_size=1, max_size=12, unique_by=lambda name: normalize_names([name]))

    @every(classes, few=25)
    def check(classes):
        names = normalize_names(classes)
        plain = [name for name in names if f'"{name}"' not in names]
        quoted = ['"' + name.replace('"', '""') + '"' for name in plain]
        assert [names[label] for label in labels_asked(quoted, names, 12)] == plain
        try:
            asked = labels_asked(split_classes(",".join(map(quote_class_name, names)), names), names, 12)
        except ConfigError as error:
            assert "is the name of label" in str(error)
        else:
            assert asked == list(range(len(names)))
