"""Images in Parquet and tar shards: rows, draws and batches as from files, and damage that is named."""

import dataclasses
import io
import json
import os
import sys
import tarfile

import numpy as np
import pytest
from PIL import Image

from mindspeed_mm_dit.configs.images import DatasetParam
from mindspeed_mm_dit.data import shard_rows, shards
from mindspeed_mm_dit.data.images import ImageReader
from mindspeed_mm_dit.data.order import order_of
from mindspeed_mm_dit.data.shard_rows import ShardQuery, members, scan_tar
from mindspeed_mm_dit.errors import ConfigError, DataError
from tests.data_fixtures import open_rows, split_rows

ROWS = 24


def png(number, size=(8, 8)):
    """An image of its own for each number."""
    content = io.BytesIO()
    Image.fromarray(np.random.default_rng(number).integers(0, 256, (*size, 3), np.uint8)).save(content, "PNG")
    return content.getvalue()


def add(archive, name, content=b"x", **fields):
    member = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(member, field, value)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def write_tar(path, samples):
    """samples: (key, {suffix: bytes})."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for key, files in samples:
            for suffix, content in files.items():
                add(archive, f"{key}{suffix}", content)


def write_tars(folder, label=lambda number: str(number % 2)):
    for shard in range(3):
        numbers = range(shard * 8, shard * 8 + 8)
        samples = [(f"{n:04d}", {".cls": label(n).encode(), ".png": png(n)}) for n in numbers]
        write_tar(folder / f"train-{shard:05d}.tar", samples)


def write_parquets(folder, names=("cat", "dog"), rows=None):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    kind = {"names": list(names), "_type": "ClassLabel"}
    metadata = {b"huggingface": json.dumps({"info": {"features": {"label": kind}}}).encode()} if names else None
    image = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    schema = pyarrow.schema([("image", image), ("label", pyarrow.int64())], metadata)
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for shard in range(3):
        numbers = range(shard * 8, shard * 8 + 8)
        images = [{"bytes": (rows or {}).get(n, png(n)), "path": f"{n}.png"} for n in numbers]
        table = pyarrow.table({"image": images, "label": [n % 2 for n in numbers]}, schema)
        parquet.write_table(table, folder / f"data/train-{shard:05d}-of-00003.parquet", row_group_size=3)


KIND = shards.KINDS["webdataset"]
WRITERS = {"parquet": write_parquets, "webdataset": write_tars}


def param(folder, kind="webdataset", **changes):
    return DatasetParam(str(folder), 8, dataset_type=kind, **changes)


@pytest.fixture(params=list(WRITERS))
def kind(request):
    if request.param == "parquet":
        pytest.importorskip("pyarrow")
    return request.param


def read(index, numbers=None):
    numbers = np.arange(len(index)) if numbers is None else numbers
    return ImageReader(index, 8, 3).read(numbers, np.zeros(len(numbers), bool)).arrays["pixels"]


def test_rows_of_shards_are_the_images_in_their_order(tmp_path, kind, monkeypatch):
    WRITERS[kind](tmp_path)
    (tmp_path / f".train-00009.{'tar' if kind == 'webdataset' else kind}").write_bytes(b"not read")
    index = open_rows(param(tmp_path, kind), 2)
    assert index.labels.tolist() == [n % 2 for n in range(ROWS)]
    assert index.classes == (("cat", "dog") if kind == "parquet" else ("0", "1"))
    expected = [np.asarray(Image.open(io.BytesIO(png(n)))).transpose(2, 0, 1) for n in range(ROWS)]
    assert np.array_equal(read(index), np.stack(expected))
    assert index.paths[10].endswith(": row 2") and "train-00001" in index.paths[10]
    monkeypatch.setattr("mindspeed_mm_dit.data.images.DECODE_CHECK_LIMIT", 5)
    monkeypatch.setattr(shards.ShardRows, "content", lambda *args: pytest.fail("opened"))
    assert "none is opened before it is read" in open_rows(param(tmp_path, kind), 2).notes[0]


def test_a_split_holds_out_the_same_images_as_of_files(tmp_path, kind):
    WRITERS[kind](tmp_path / "shards")
    for number in range(ROWS):
        (tmp_path / "files").mkdir(exist_ok=True)
        (tmp_path / f"files/{number:02d}.png").write_bytes(png(number))
    of_files = open_rows(DatasetParam(str(tmp_path / "files"), 8, single_class=True), 1)
    of_shards = open_rows(param(tmp_path / "shards", kind), 2)
    for files, rows in zip(split_rows(of_files, 0.25, 7), split_rows(of_shards, 0.25, 7)):
        assert np.array_equal(read(files), read(rows)) and len(rows) in (6, 18)


def test_images_in_shards_go_to_buckets_by_their_shape(tmp_path, kind, monkeypatch):
    sizes = [(8, 12), (12, 8), (16, 17)]
    monkeypatch.setattr(sys.modules[__name__], "png", lambda number, png=png: png(number, sizes[number % 3]))
    WRITERS[kind](tmp_path)
    own = dataclasses.replace(param(tmp_path, kind), image_size=None, buckets=((4, 6), (6, 4), (4, 4)), bucket_group=2)
    index = open_rows(own)
    assert index.shapes.tolist() == [[4, 6], [6, 4], [4, 4]] * 8 and index.sizes.tolist() == list(map(list, sizes)) * 8
    order = order_of(index, own, seed=0, shuffle=True)
    for start in range(0, ROWS, 2):
        rows = order.images(np.arange(start, start + 2))
        (shape,) = {tuple(shape) for shape in index.shapes[rows].tolist()}
        assert read(index, rows).shape == (2, 3, *shape)


def test_shards_are_looked_through_once_and_again_when_one_has_changed(tmp_path, kind, monkeypatch):
    WRITERS[kind](tmp_path)
    first = open_rows(param(tmp_path, kind), 2)
    looked = []
    scan = shards.KINDS[kind].scan
    counted = shards.KINDS[kind]._replace(scan=lambda *args: looked.append(args[0].name) or scan(*args))
    monkeypatch.setitem(shards.KINDS, kind, counted)
    again = open_rows(param(tmp_path, kind), 2)
    assert not looked and again.digest == first.digest and np.array_equal(read(again), read(first))
    shard = next(tmp_path.rglob("train-00001*"))
    os.utime(shard, ns=(1, 1))
    assert open_rows(param(tmp_path, kind), 2).digest == first.digest and len(looked) == 3
    (tmp_path / shards.INDEX).write_bytes(b"damaged")
    assert len(open_rows(param(tmp_path, kind), 2)) == ROWS and len(looked) == 6
    whole = open_rows(param(tmp_path, kind), 2)
    place = tmp_path / shards.INDEX
    content = place.read_bytes()
    flipped = content.replace(b'"words"', b'"wards"')  # (each array has a checksum)
    for damaged in (b"", b"no zip file", content[: len(content) // 2], flipped):
        place.write_bytes(damaged)
        again = open_rows(param(tmp_path, kind), 2)
        assert again.labels.tolist() == whole.labels.tolist() and again.digest == whole.digest
        assert sum(f"{place} is damaged" in note for note in again.notes) == 1
        assert not any("damaged" in note for note in open_rows(param(tmp_path, kind), 2).notes)


def test_index_is_written_in_the_folder_and_may_be_read_by_all(tmp_path, monkeypatch):
    write_tars(tmp_path)
    assert not open_rows(param(tmp_path), 2).notes
    assert (tmp_path / shards.INDEX).stat().st_mode & 0o777 == 0o644
    (tmp_path / shards.INDEX).unlink()

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shards, "_write_index", full)
    index = open_rows(param(tmp_path), 2)
    assert len(index) == ROWS and "cannot be written" in index.notes[0]
    for read_bytes, notes in ((64 * 2**20, 1), (1500 * 2**20, 2)):
        large = KIND._replace(scan=lambda *args, size=read_bytes: KIND.scan(*args)._replace(read_bytes=size))
        monkeypatch.setitem(shards.KINDS, "webdataset", large)
        found = open_rows(param(tmp_path), 2).notes
        assert len(found) == notes and ("1,500 MiB" in found[-1]) == (notes == 2)


def test_damaged_rows_are_refused_or_left_out(tmp_path):
    write_tars(tmp_path)
    write_tar(tmp_path / "train-00003.tar", [("a", {".png": b"no image", ".cls": b"1"}), ("b", {".txt": b"x"})])
    pytest.raises(DataError, open_rows, param(tmp_path), 2).match(r"1 of 25 images.*train-00003\.tar: row 0 ")
    index = open_rows(param(tmp_path, skip_bad_images=True), 2)
    assert (len(index), index.skipped) == (ROWS, 1)
    assert index.problems[0].startswith(f"{tmp_path}/train-00003.tar: row 0")
    assert "note: left out: 1 file(s) of samples without an image or a .cls" in index.notes


@pytest.mark.parametrize(("columns", "message"), [
    ({"image": ["a.png", "b.png"], "label": [0, 1]}, "Column image"),
    ({"image": [[b"a"], [b"b"]], "label": [0, 1]}, "Column image"),
    ({"image": [{"path": "a.png"}] * 2, "label": [0, 1]}, "Column image"),
    ({"image": [{"bytes": b"a"}] * 2, "label": [0, None]}, "Row 1"),
    ({"image": [{"bytes": b"a"}] * 2, "label": [0.5, 1.5]}, "Column label.*double"),
    ({"picture": [b"a", b"b"], "label": [0, 1]}, "picture, label"),
])  # fmt: skip
def test_parquet_without_images_or_labels_is_refused(tmp_path, columns, message):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    pytest.raises(DataError, open_rows, param(tmp_path, "parquet"), 2).match(message)


def test_classes_of_parquet_are_listed_once_and_rows_without_images_named(tmp_path):
    write_parquets(tmp_path, names=("cat",))
    assert open_rows(param(tmp_path, "parquet"), 2).classes == ("cat", "1")
    write_parquets(tmp_path, names=("cat", "cat"))
    pytest.raises(DataError, open_rows, param(tmp_path, "parquet"), 2).match("'cat' of column label")
    write_parquets(tmp_path, rows={9: None, 17: b"no image"})
    pytest.raises(DataError, open_rows, param(tmp_path, "parquet"), 2).match("2 of 24.*00001-of.*row 1 .*no bytes")
    index = open_rows(param(tmp_path, "parquet", skip_bad_images=True), 2)
    assert index.skipped == 2 and "train-00002-of-00003.parquet: row 1 cannot be decoded" in index.problems[1]


def test_what_goes_away_after_the_look_is_named_when_it_is_drawn(tmp_path, kind):
    WRITERS[kind](tmp_path)
    index = open_rows(param(tmp_path, kind), 2)
    for shard in tmp_path.rglob("train-00002*"):
        shard.unlink()
    pytest.raises(DataError, read, open_rows_again(index), np.array([20])).match("row 4 .*shard does not exist")


def open_rows_again(index):
    """The index without what its reader keeps in memory."""
    rows = index.paths
    reader = type(rows._reader)()
    return index.__class__(shards.ShardRows(rows._files, rows._starts, rows._where, rows._rows, reader), index.labels)


def test_splits_are_chosen_by_name(tmp_path):
    write_tars(tmp_path)
    write_tar(tmp_path / "test-00000.tar", [("x", {".png": png(99), ".cls": b"1"})])
    pytest.raises(DataError, open_rows, param(tmp_path), 2).match(r"holds the splits test, train")
    for split, rows in (("train", ROWS), ("test", 1)):
        assert len(open_rows(param(tmp_path, split=split), 2)) == rows
    pytest.raises(DataError, open_rows, param(tmp_path, split="valid")).match(r"\.tar.*'valid'")


def test_what_is_no_shard_is_refused(tmp_path):
    write_tars(tmp_path)
    whole = (tmp_path / "train-00001.tar").read_bytes()
    (tmp_path / "train-00001.tar").write_bytes(whole[: len(whole) // 2 + 700])
    pytest.raises(DataError, open_rows, param(tmp_path), 2).match(r"train-00001\.tar.*not a complete tar")
    (tmp_path / "train-00001.tar").write_bytes(whole)
    pytest.raises(DataError, open_rows, param(tmp_path), 1).match(r"train-00000\.tar.*row 1.*label 1.* 0 \.\.\. 0")
    pytest.raises(DataError, open_rows, param(tmp_path, "parquet"), 2).match(r"\.parquet(?!, and)")
    pytest.raises(ConfigError, param, tmp_path, index="labels.csv").match("index")
    write_tar(tmp_path / "empty/train-0.tar", [("a", {".txt": b"x"})])
    for labelled, wanted in ((True, "images with labels"), (False, "no images")):
        pytest.raises(DataError, shards.list_shards, param(tmp_path / "empty"), labelled).match(wanted)


def test_digest_of_shards_depends_on_names_sizes_and_labels(tmp_path):
    def digest(folder, rename="train-00000.tar", label=lambda number: str(number % 2), longer=b""):
        write_tars(tmp_path / folder, label)
        first = tmp_path / folder / "train-00000.tar"
        first.write_bytes(first.read_bytes() + longer)
        first.rename(first.with_name(rename))
        return open_rows(param(tmp_path / folder)).digest

    one = digest("a")
    assert one.startswith("24 images, ") and len(one) == len("24 images, ") + 12 and digest("b") == one
    others = [digest("c", "train-0000.tar"), digest("d", label=lambda number: "0"), digest("e", longer=bytes(1024))]
    assert len({one, *others}) == 4


def test_few_row_groups_stay_in_memory_and_no_file_open(tmp_path, monkeypatch):
    write_parquets(tmp_path)
    index = open_rows(param(tmp_path, "parquet"), 2)
    expected = read(index)
    monkeypatch.setattr(shard_rows, "CACHE_BYTES", 1)
    before, again = len(os.listdir("/proc/self/fd")), open_rows_again(index)
    assert np.array_equal(read(again, np.arange(ROWS)[::-1]), expected[::-1])
    assert len(os.listdir("/proc/self/fd")) == before and len(again.paths._reader._groups) == 1


BLOCK = tarfile.BLOCKSIZE
FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def files_in(path):
    with open(path, "rb") as file:
        return [(member.name, member.offset_data, member.size) for member in members(file)]


def plain_shard(path, form=tarfile.PAX_FORMAT):
    """Write four samples of five blocks: a header and the label, a header and two blocks of the image."""
    with tarfile.open(path, "w", format=form) as archive:
        for number in range(4):
            add(archive, f"{number}.cls", b"1")
            add(archive, f"{number}.png", b"p" * 700)
    return path.read_bytes()


@pytest.mark.parametrize("form", FORMATS)
def test_only_files_are_members_whatever_the_headers(tmp_path, form):
    long = "a-folder-with-a-long-name/" * (4 if form == "ustar" else 12)
    with tarfile.open(tmp_path / "a.tar", "w", format=FORMATS[form]) as archive:
        add(archive, "folder", b"", type=tarfile.DIRTYPE)
        add(archive, "0.png", b"p" * 1025)
        add(archive, "link", b"", type=tarfile.SYMTYPE, linkname="0.png")
        add(archive, f"{long}1.png", b"q" * 512)  # ustar's prefix, GNU's long name, a record of pax
        add(archive, "sparse.png", b"has no place of its own", type=tarfile.GNUTYPE_SPARSE)
        add(archive, "猫.png", b"r" * 3, mtime=1.5)
    assert [name for name, _, _ in files_in(tmp_path / "a.tar")] == ["0.png", f"{long}1.png", "猫.png"]


@pytest.mark.parametrize("form", FORMATS)
def test_a_file_cut_between_two_members_is_refused(tmp_path, form):
    whole = plain_shard(tmp_path / "a.tar", FORMATS[form])
    last = files_in(tmp_path / "a.tar")[-1][1]
    for end in (last - BLOCK, last + 2 * BLOCK):  # before the header of the last file, and behind it
        (tmp_path / "a.tar").write_bytes(whole[:end])
        pytest.raises(tarfile.ReadError, files_in, tmp_path / "a.tar").match("empty blocks")
    (tmp_path / "a.tar").write_bytes(whole[: last + 3 * BLOCK])  # one of the two is enough: some programs count on it
    assert len(files_in(tmp_path / "a.tar")) == 8


@pytest.mark.parametrize(("damage", "reason"), [
    (lambda content: content[:2559], r"0\.png|unexpected end"),
    (lambda content: content[:2561], "byte 2,560|truncated"),
    (lambda content: content[:3072], r"1\.cls|unexpected end"),
    (lambda content: content[:2560] + b"\xff" + content[2561:], "byte 2,560"),
    (lambda content: content[:2690] + b"7" + content[2691:], "byte 2,560"),
    (lambda content: b"\xff" + content[1:], "bad checksum"),
    (lambda content: content[:100], "truncated header"),
    (lambda content: b"no tar file" * 100, "invalid header|bad checksum"),
])  # fmt: skip
def test_damaged_tar_is_refused(tmp_path, damage, reason):
    (tmp_path / "a.tar").write_bytes(damage(plain_shard(tmp_path / "a.tar")))
    pytest.raises(DataError, scan_tar, tmp_path / "a.tar", ShardQuery()).match(rf"a\.tar.*complete tar.*({reason})")


@pytest.mark.parametrize(("files", "message"), [
    *(({".cls": label}, r"0\.cls") for label in (b"1" * 1001, b"", b" \n", b"a\nb", b"\xff\xfe3\0", b"3\0")),
    ({".PNG": b"x", ".cls": b"1"}, r"a\.tar.*0\.PNG"),
])  # fmt: skip
def test_unusable_sample_is_refused(tmp_path, files, message):
    write_tar(tmp_path / "a.tar", [("0", {".png": b"x", **files})])
    pytest.raises(DataError, scan_tar, tmp_path / "a.tar", ShardQuery()).match(message)


@pytest.mark.parametrize(("names", "labels", "left_out"), [
    ("d/._a.png d/a.png d/._a.cls d/a.cls", "d/a.cls", {"file(s) whose names begin with a dot": 2}),
    ("a.png README a.cls", "a.cls", {"file(s) without an ending": 1}),
    ("a.png a.json a.PNG.bak a.cls", "a.cls", {".json": 1, ".png.bak": 1}),
    ("a.jpg a.png a.cls", "a.cls", {"image(s) after the first of a sample": 1}),
    ("a.v1.png a.cls a.v2.png", "", {"file(s) of samples without an image or a .cls": 3}),
    ("a.png b.png a.cls b.cls", "", {"file(s) of samples without an image or a .cls": 4}),
    ("a.png a.cls b.png b.cls a.png a.cls", "a.cls b.cls a.cls", {}),
    ("d\\a.png d\\a.cls e/a.png e/a.cls x.y/a.png x.y/a.cls", "d\\a.cls e/a.cls x.y/a.cls", {}),
])  # fmt: skip
def test_samples_are_grouped_as_webdataset_does(tmp_path, names, labels, left_out):
    write_tar(tmp_path / "a.tar", [(name, {"": name.encode()}) for name in names.split()])
    scanned = scan_tar(tmp_path / "a.tar", ShardQuery())
    assert (scanned.labels, scanned.left_out) == (labels.split(), left_out)
    content = (tmp_path / "a.tar").read_bytes()
    images = [content[first : first + size].decode() for first, size in scanned.where.tolist()]
    assert [image.partition(".")[0] for image in images] == [label.partition(".")[0] for label in labels.split()]
