import csv
import dataclasses
import io
import json
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageOps
from sklearn.datasets import load_digits

from mindspeed_mm_dit.configs.images import ClipsParam, DatasetParam
from mindspeed_mm_dit.data.check_images import find_copies
from mindspeed_mm_dit.data.images import folder_as_listed
from mindspeed_mm_dit.data.labels import normalize_names
from mindspeed_mm_dit.data.order import order_of
from mindspeed_mm_dit.data.sources import SourceRequest, source_of
from mindspeed_mm_dit.data.transforms import load_pixels, readable_formats
from mindspeed_mm_dit.errors import ConfigError, DataError
from mindspeed_mm_dit.sampling.conditions import labels_of as labels_asked
from mindspeed_mm_dit.sampling.conditions import quote_class_name, split_classes
from tests.data.test_sharded import write_tar
from tests.data_fixtures import open_rows, split_rows


@pytest.fixture
def folder(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(3):
            Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / name / f"{number}.png")
    return tmp_path


def param(folder, **changes):
    return DatasetParam(data_folder=str(folder), image_size=8, **changes)


def write_index(folder, rows, header=("image_path", "label")):
    with open(folder / "labels.csv", "w", newline="") as file:
        csv.writer(file).writerows([header, *rows])


@pytest.mark.parametrize(("names", "setting", "kept", "classes", "repeats"), [
    (("10_sks dog", "3_cat"), None, (), ("cat", "sks dog"), [10] * 3 + [3] * 3),
    (("10_dog", "5_dog"), None, (), ("dog",), [10] * 3 + [5] * 3),
    (("7_dog", "7_cat"), None, (), ("cat", "dog"), [7] * 6),
    (("1_dog", "2_cat"), True, (), ("cat", "dog"), [1] * 3 + [2] * 3),
    *((names, None, (), names, None)
      for names in (("1_dog", "2_cat"), ("10_dog", "cat"), ("01_dog", "10_cat"), ("2019_a", "2030_b"))),
    (("10_dog", "3_cat"), False, (), ("10_dog", "3_cat"), None),
    (("10_dog", "3_cat"), None, ("10_dog", "3_cat"), ("10_dog", "3_cat"), None),
])  # fmt: skip
@pytest.mark.parametrize("captioned", [False, True])
def test_repeats_in_names_of_folders_follow_kohya(folder, names, setting, kept, classes, repeats, captioned):
    for old, new in zip(("dog", "cat"), names):
        (folder / old).rename(folder / new)
        for number in range(3 * captioned):
            (folder / new / f"{number}.txt").write_text("a pet")
    own = param(folder, folder_repeats=setting, captions=".txt" if captioned else None)
    rows = source_of(own).open(own, SourceRequest(("caption",) if captioned else ("label",), classes=kept))
    found = None if rows.repeats is None else sorted(rows.repeats.tolist())
    assert found == (repeats and sorted(repeats)) and (captioned or rows.classes == classes)
    assert any("folder_repeats" in note for note in rows.notes) == (repeats is not None)


@pytest.mark.parametrize("buckets", [None, ((8, 8), (8, 12))])
def test_epoch_takes_each_image_as_often_as_it_repeats(folder, buckets):
    (folder / "cat").rename(folder / "4_cat")
    (folder / "dog").rename(folder / "2_dog")
    if buckets:
        Image.new("RGB", (12, 8)).save(folder / "4_cat/0.png")
    own = dataclasses.replace(param(folder), image_size=None if buckets else 8, buckets=buckets, bucket_group=2)
    rows = open_rows(own, 2).subset(np.array([0, 1, 3, 4, 5]))
    order = order_of(rows, own, seed=3, shuffle=True)
    epochs = [order.images(np.arange(16) + start) for start in (0, 16)]
    assert len(order) == 16 and [np.bincount(own).tolist() for own in epochs] == [[2, 2, 4, 4, 4]] * 2
    assert not np.array_equal(*epochs)
    parts = [order.micro_batches(0, 2, rank, ranks, 4 // ranks) for ranks in (1, 2) for rank in range(ranks)]
    one, *two = (np.concatenate([next(own) for _ in range(2 if n else 4)]) for n, own in enumerate(parts))
    assert sorted(one.tolist()) == sorted(np.concatenate(two).tolist()) == list(range(8))
    held_out = order_of(rows, own, seed=3, shuffle=True, held_out=True).images(np.arange(5))
    assert buckets or np.bincount(held_out).tolist() == [1] * 5
    there = dataclasses.replace(rows, paths=[path.replace(str(folder), "gone") for path in rows.paths], repeats=None)
    listed = folder_as_listed(dataclasses.replace(own, data_folder="gone"), there)
    assert listed.repeats.tolist() == rows.repeats.tolist()
    one_class = param(folder / "4_cat", single_class=True, folder_repeats=True)
    pytest.raises(DataError, open_rows, one_class, 1).match("folder_repeats")


def test_single_class_holds_every_image_below_the_folder(folder, tmp_path_factory):
    Image.new("RGB", (8, 8)).save(folder / "loose.png")
    index = open_rows(param(folder, single_class=True), 1)
    assert len(index) == 7 and set(index.labels.tolist()) == {0} and index.classes == (folder.name,)
    pytest.raises(ConfigError, param, folder, single_class=True, index="labels.csv").match("single_class = true")
    alone = tmp_path_factory.mktemp("alone")
    shutil.copy(folder / "loose.png", alone)
    pytest.raises(DataError, open_rows, param(alone), 1).match(r"dataset_param\.single_class")


def test_bad_images_can_be_skipped_and_are_counted(folder):
    write_index(folder, [("cat/0.png", 0), ("cat/9.png", 0), ("dog/1.png", 1)])
    index = open_rows(param(folder, index="labels.csv", skip_bad_images=True), 2)
    problems = (f"{folder}/cat/9.png does not exist",)
    assert (len(index), index.skipped, index.problems) == (2, 1, problems)


def test_hidden_and_private_folders_and_files_are_no_data(folder):
    for place in (".ipynb_checkpoints", "__MACOSX", "cat/.thumbs", "cat/__pycache__"):
        (folder / place).mkdir()
        (folder / place / "x.png").write_bytes(b"no image")
    for name in ("cat/._0.png", "cat/.x.png", "cat/notes.txt", "cat/README", "loose.png", "labels.csv"):
        (folder / name).write_bytes(b"no image")
    index = open_rows(param(folder), 2)
    assert index.labels.tolist() == [0, 0, 0, 1, 1, 1] and index.classes == ("cat", "dog")


def test_doubtful_images_are_counted(folder, monkeypatch):
    """One kind of image after another; each is named by its note and by no other."""
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    monkeypatch.setattr("mindspeed_mm_dit.data.check_images.HUGE_MEGAPIXELS", 3000 / 1e6)
    frames[0].save(folder / "dog/camera.jpg", format="MPO", save_all=True, append_images=frames[1:])  # with a preview
    frames[0].convert("RGBA").save(folder / "dog/opaque.png")
    assert not open_rows(param(folder), 2).notes
    for name, save, word in (
        ("moves.gif", lambda path: frames[0].save(path, save_all=True, append_images=frames[1:]), "first frame"),
        ("glass.png", Image.new("RGBA", (8, 8), (0, 0, 0, 128)).save, "white"),
        ("tiny.png", Image.new("L", (1, 1)).save, "enlarged"),
        ("huge.png", Image.new("L", (60, 60)).save, "megapixels"),
        ("long.png", Image.new("RGB", (80, 20)).save, "times as long"),
        ("raw.cr2", lambda path: path.write_bytes(b""), "left out: 1 .cr2"),
    ):
        save(folder / "cat" / name)
        (note,) = open_rows(param(folder), 2).notes
        assert word in note and (name in note or "left out" in note)
        (folder / "cat" / name).unlink()
    for name, alpha in (("glass", 128), ("nothing", 0)):
        Image.new("RGBA", (8, 8), (9, 9, 9, alpha)).save(folder / f"cat/{name}.png")
    partly, wholly = open_rows(param(folder), 2).notes
    assert partly.startswith("note: 2 of 10 ") and partly.endswith("glass.png")
    assert wholly.startswith("warning: 1 of 10 ") and wholly.endswith("nothing.png")


def test_any_image_that_pillow_reads_is_used_whatever_its_suffix(folder):
    Image.new("L", (8, 8)).save(folder / "cat/x.png")
    for suffix in ("jfif", "JPE", "avif", "jp2", "pgm"):
        shutil.copy(folder / "cat/x.png", folder / f"cat/x.{suffix}")
    index = open_rows(param(folder), 2)
    assert len(index) == 12 and not [note for note in index.notes if "left out" in note]


def test_heif_photographs_are_upright(folder):
    """A HEIF is turned by boxes of its own, which repeat the EXIF orientation: it is turned once."""
    pytest.importorskip("pillow_heif")
    assert ".heic" in readable_formats()
    image = Image.new("RGB", (64, 32), "blue")
    image.paste((200, 30, 30), (0, 0, 32, 8))
    exif = image.getexif()
    for orientation in range(1, 9):
        exif[ExifTags.Base.Orientation] = orientation
        image.save(folder / "cat/x.heic", exif=exif.tobytes(), quality=-1)
        upright = np.asarray(ImageOps.exif_transpose(image)).transpose(2, 0, 1).astype(int)
        assert np.abs(load_pixels(folder / "cat/x.heic", upright.shape[1:], 3) - upright).max() <= 1, orientation
    (folder / "cat/x.heic").rename(folder / "cat/x.HEIC")
    index = open_rows(param(folder), 2)
    assert len(index) == 7 and not index.notes


def test_of_a_large_data_set_it_is_said_that_only_headers_were_checked(folder, monkeypatch):
    monkeypatch.setattr("mindspeed_mm_dit.data.images.DECODE_CHECK_LIMIT", 5)
    whole = (folder / "cat/0.png").read_bytes()
    (folder / "cat/0.png").write_bytes(whole[:45])
    index = open_rows(param(folder), 2)
    assert len(index) == 6 and "only the headers were checked" in index.notes[0]
    pytest.raises(DataError, open_rows, param(folder), 2, decode_all=True).match(r"0\.png cannot be decoded")


def test_copies_are_found_among_files_of_one_size_and_gone_ones_are_no_copies(folder):
    paths = [str(path) for path in sorted(folder.rglob("*.png"))]
    (folder / "cat/1.png").write_bytes((folder / "cat/0.png").read_bytes()[:-1] + b"x")  # of one size, another content
    Image.new("RGB", (8, 8), (9, 9, 9)).save(paths[3])
    (folder / "dog/2.png").write_bytes((folder / "cat/1.png").read_bytes())
    copies = find_copies([paths[0], paths[1], paths[3], paths[5], paths[1], str(folder / "gone.png")])
    assert copies == [(3, 1), (4, 1)]


def test_the_digest_of_the_images_knows_names_sizes_and_labels(folder, tmp_path_factory):
    before = open_rows(param(folder), 2).digest
    moved = shutil.copytree(folder, tmp_path_factory.mktemp("moved") / "images")
    assert open_rows(param(moved), 2).digest == before and before.startswith("6 images, ")
    assert [part.digest for part in split_rows(open_rows(param(folder), 2), 0.5, seed=0)] == [before, before]
    seen = {before}
    for change in (
        lambda: (moved / "cat/0.png").rename(moved / "cat/9.png"),
        lambda: Image.effect_noise((9, 9), 50).save(moved / "cat/9.png"),
        lambda: (moved / "cat").rename(moved / "zebra"),  # its label and that of dog change places
    ):
        change()
        seen.add(open_rows(param(moved), 3).digest)
    assert len(seen) == 4


def test_classes_are_named_by_folders_by_labels_and_by_numbers(folder):
    shutil.copytree(folder / "dog", folder / "e\u0301lan")  # decomposed, as macOS writes it
    (folder / "bird").mkdir()  # without images it is no class
    index = open_rows(param(folder), 3)
    assert index.classes == ("cat", "dog", "élan") and set(index.labels.tolist()) == {0, 1, 2}
    for words, labels, names in ((("dog", "cat"), [1, 0], ("cat", "dog")), (("2", "0"), [2, 0], ("0", "1", "2"))):
        write_index(folder, [("cat/0.png", words[0]), ("dog/2.png", words[1])])
        index = open_rows(param(folder, index="labels.csv"), 3)
        assert (index.classes, index.labels.tolist()) == (names, labels) and index.paths[1].endswith("dog/2.png")


def test_the_digits_are_written_as_an_image_folder(digits_folder):
    index, real = open_rows(param(digits_folder, index="labels.csv"), 10), load_digits()
    assert len(index) == 1797
    np.testing.assert_array_equal(index.labels, real.target)
    np.testing.assert_allclose(load_pixels(index.paths[17], 8, 1)[0] * (16 / 255), real.images[17], atol=0.04)


@pytest.mark.parametrize(("ending", "how"), [("png", {}), ("png", {"transparency": 40000}), ("tif", {}), ("pgm", {})])
def test_grey_of_16_bits_is_scaled_and_rounded_to_the_nearest_of_8(tmp_path, ending, how):
    ramp = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    Image.fromarray(ramp).save(tmp_path / f"ramp.{ending}", **how)
    for channels in (1, 3):
        pixels = load_pixels(str(tmp_path / f"ramp.{ending}"), 8, channels)
        np.testing.assert_allclose(pixels, np.broadcast_to(ramp / 257, pixels.shape), atol=0.5)
    steps = np.arange(0, 255, 8).reshape(4, 8)  # one step is 257: from 129 on a value belongs to the next
    for more, rounded in ((-128, 0), (-129, -1), (0, 0), (128, 0), (129, 1)):
        Image.fromarray(np.clip(257 * (steps + 1) + more, 0, 65535).astype(np.uint16)).save(tmp_path / "grey.png")
        assert (load_pixels(str(tmp_path / "grey.png"), 4, 1)[0] == steps[:, 2:6] + 1 + rounded).all()


@pytest.mark.parametrize(("version", "is_read"), [(None, False), ("1.0.0", False), ("1.1.0", True), ("0.22.0", False)])
def test_heif_needs_a_reader_that_turns_once(monkeypatch, version, is_read):
    registered = []
    reader = version and SimpleNamespace(__version__=version, register_heif_opener=lambda: registered.append(version))
    monkeypatch.setitem(sys.modules, "pillow_heif", reader)
    readable_formats.cache_clear()
    try:
        assert readable_formats() and bool(registered) == is_read
    finally:
        readable_formats.cache_clear()


def red_png(number):
    """An image whose red is ``number``."""
    content = io.BytesIO()
    Image.new("RGB", (8, 8), (number, 0, 0)).save(content, "PNG")
    return content.getvalue()


def of_folders(folder, words):
    for number, word in enumerate(words):
        (folder / word).mkdir(exist_ok=True)
        (folder / word / f"{number}.png").write_bytes(red_png(number))
    return DatasetParam(str(folder), 8)


def of_csv(folder, words):
    for number in range(len(words)):
        (folder / f"{number}.png").write_bytes(red_png(number))
    with open(folder / "labels.csv", "w", newline="", encoding="utf-8") as file:
        rows = [(f"{number}.png", word) for number, word in enumerate(words)]
        csv.writer(file).writerows([("image_path", "label"), *rows])
    return DatasetParam(str(folder), 8, index="labels.csv")


def of_tars(folder, words):
    """Each sample in a shard of its own."""
    for number, word in enumerate(words):
        write_tar(folder / f"{number:02d}.tar", [("x", {".cls": word.encode(), ".png": red_png(number)})])
    return DatasetParam(str(folder), 8, dataset_type="webdataset")


def of_parquets(folder, words, listed=None):
    """The same; ``listed``: for each shard the names in the hub's features, of which the label is a number."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    for number, word in enumerate(words):
        names = listed[number] if listed else None
        table = pyarrow.table({"image": [red_png(number)], "label": [names.index(word) if names else word]})
        if names:
            by_number = {str(label): name for label, name in sorted(enumerate(names), reverse=True)}
            kind = {"info": {"features": {"label": {"names": by_number if number else names}}}}  # a list, or an object
            table = table.replace_schema_metadata({"huggingface": json.dumps(kind)})
        parquet.write_table(table, folder / f"{number:02d}.parquet")
    return DatasetParam(str(folder), 8, dataset_type="parquet")


def of_clips(folder, words):
    for number in range(len(words)):
        (folder / f"{number}.png").write_bytes(red_png(number))
    entries = [{"path": f"{number}.png", "kind": word} for number, word in enumerate(words)]
    (folder / "clips.json").write_text(json.dumps(entries))
    return ClipsParam(str(folder), str(folder / "clips.json"), 1, 8, 8, label_key="kind")


WRITERS = {"folders": of_folders, "csv": of_csv, "tars": of_tars, "parquets": of_parquets, "clips": of_clips}


def opened_labels(param, num_classes=None, classes=()):
    return source_of(param).open(param, SourceRequest(("label",), num_classes, classes=classes))


def labels_by_image(param, rows):
    pixels = source_of(param).visuals(rows, param, 3).read(np.arange(len(rows)), np.zeros(len(rows))).arrays["pixels"]
    return dict(sorted(zip(pixels.reshape(len(rows), -1).max(1).tolist(), rows.labels.tolist())))


@pytest.mark.parametrize("source", WRITERS)
@pytest.mark.parametrize(("words", "numbers", "classes"), [
    (["10", "2", "0", "1"], [10, 2, 0, 1], tuple(map(str, range(11)))),
    (["03", "1", "2"], [3, 1, 2], ("0", "1", "2", "3")),
    (["dog", "cat", "class 10", "class 9"], [3, 0, 1, 2], ("cat", "class 10", "class 9", "dog")),
    (["e\u0301lan", "zebra", "2024_01"], [2, 1, 0], ("2024_01", "zebra", "élan")),
])  # fmt: skip
def test_numbers_are_labels_and_names_are_numbered_everywhere(tmp_path, source, words, numbers, classes):
    rows = opened_labels(param := WRITERS[source](tmp_path, words))
    assert rows.classes == classes and labels_by_image(param, rows) == dict(enumerate(numbers))


@pytest.mark.parametrize("source", WRITERS)
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
        pytest.raises(DataError, opened_labels, WRITERS[source](place, words), classes).match(f"{place}.*{problem}")


@pytest.mark.parametrize("source", WRITERS)
def test_resumed_run_or_cache_keeps_the_numbers_of_names(tmp_path, source):
    words = ["0", "1", "2", "10"]
    rows = opened_labels(param := WRITERS[source](tmp_path, words), 4, classes=("0", "1", "10", "2"))
    assert labels_by_image(param, rows) == {0: 0, 1: 1, 2: 3, 3: 2} and rows.classes == ("0", "1", "10", "2")
    assert [note for note in rows.notes if "keep the numbers they had: '10' is label 2" in note]
    assert opened_labels(param, classes=("0", "1", "10")).classes == tuple(map(str, range(11)))
    cached = source_of(param).as_listed(param, rows)
    assert cached.classes == rows.classes and cached.labels.tolist() == rows.labels.tolist()


def test_names_that_shards_number_differently_are_one_class(tmp_path):
    listed = [["cat", "dog", "emu"], ["emu", "cat", "dog"], ["dog", "fox"]]
    rows = opened_labels(param := of_parquets(tmp_path, ["dog", "dog", "fox"], listed))
    assert rows.classes == ("cat", "dog", "emu", "fox") and labels_by_image(param, rows) == {0: 1, 1: 1, 2: 3}
    for word in (1, "owl"):
        param = of_parquets(tmp_path, ["dog", word], [["cat", "dog"], None])
        pytest.raises(DataError, opened_labels, param).match(r"01\.parquet.*row 0.*cat, dog")


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
