"""Tar files: samples grouped as webdataset groups them, whatever the headers, and damage that is named."""

import io
import tarfile

import pytest

from mindspeed_mm_dit.data.shard_rows import ShardQuery, members, scan_tar
from mindspeed_mm_dit.errors import DataError

BLOCK = tarfile.BLOCKSIZE
FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def add(archive, name, content=b"x", **fields):
    member = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(member, field, value)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


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
        with pytest.raises(tarfile.ReadError, match="ends without the empty blocks that close a tar file"):
            files_in(tmp_path / "a.tar")
    (tmp_path / "a.tar").write_bytes(whole[: last + 3 * BLOCK])  # one of the two is enough: some programs count on it
    assert len(files_in(tmp_path / "a.tar")) == 8


@pytest.mark.parametrize(("damage", "reason"), [
    (lambda content: content[:2559], r"0\.png goes on after its end|unexpected end"),
    (lambda content: content[:2561], "there is no header at byte 2,560|truncated"),
    (lambda content: content[:3072], r"1\.cls goes on after its end|unexpected end"),
    (lambda content: content[:2560] + b"\xff" + content[2561:], "there is no header at byte 2,560"),
    (lambda content: content[:2690] + b"7" + content[2691:], "there is no header at byte 2,560"),
    (lambda content: b"\xff" + content[1:], "bad checksum"),
    (lambda content: content[:100], "truncated header"),
    (lambda content: b"no tar file" * 100, "invalid header|bad checksum"),
])  # fmt: skip
def test_damaged_tar_is_refused(tmp_path, damage, reason):
    (tmp_path / "a.tar").write_bytes(damage(plain_shard(tmp_path / "a.tar")))
    with pytest.raises(DataError, match=rf"a\.tar: is not a complete tar file: ({reason})"):
        scan_tar(tmp_path / "a.tar", ShardQuery())


@pytest.mark.parametrize(("files", "message"), [
    *(
        ({"0.cls": label, "0.png": b"x"}, r"0\.cls: holds b'.*', which is not a label")
        for label in (b"1" * 1001, b"", b" \n", b"cat\ndog", b"\xff\xfe3\0", b"3\0")
    ),
    ({"a.png": b"x", "a.PNG": b"x", "a.cls": b"1"}, r"a\.tar: a.PNG: occurs twice in one sample"),
])  # fmt: skip
def test_unusable_sample_is_refused(tmp_path, files, message):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, content in files.items():
            add(archive, name, content)
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
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in names.split():
            add(archive, name, name.encode())
    scanned = scan_tar(tmp_path / "a.tar", ShardQuery())
    assert (scanned.labels, scanned.left_out) == (labels.split(), left_out)
    content = (tmp_path / "a.tar").read_bytes()
    images = [content[first : first + size].decode() for first, size in scanned.where.tolist()]
    assert [image.partition(".")[0] for image in images] == [label.partition(".")[0] for label in labels.split()]
