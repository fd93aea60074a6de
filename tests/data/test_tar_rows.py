"""The files of a tar file, as tarfile finds them whatever the headers, and damage that is named."""

import io
import tarfile

import pytest

from mindspeed_mm_dit.data import shard_rows
from mindspeed_mm_dit.data.shard_rows import BLOCK, Member, ShardQuery, members
from mindspeed_mm_dit.errors import DataError

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
FOLDER = "a-folder-with-a-long-name/"
LONG = {"ustar": FOLDER * 4, "gnu": FOLDER * 12, "pax": FOLDER * 12}
"""Names of ustar have 255 bytes at most."""


def by_tarfile(path):
    with tarfile.open(path, "r:") as archive:
        return [Member(m.name, m.offset_data, m.size) for m in archive if m.isfile() and not m.issparse()]


def found(path):
    with open(path, "rb") as file:
        return list(members(file))


def add(archive, name, content=b"x", **fields):
    member = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(member, field, value)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def write_every_kind(path, form):
    """Write plain files between members of every other kind that ``form`` has."""
    with tarfile.open(path, "w", format=FORMATS[form]) as archive:
        add(archive, "0.cls", b"7")
        add(archive, "folder", b"", type=tarfile.DIRTYPE)
        add(archive, "0.png", b"p" * 1025)
        add(archive, "link", b"", type=tarfile.SYMTYPE, linkname="0.png")
        add(archive, "hard", b"", type=tarfile.LNKTYPE, linkname="0.png")
        add(archive, "pipe", b"", type=tarfile.FIFOTYPE)
        add(archive, f"{LONG[form]}1.cls", b"8")  # ustar's prefix, GNU's long name, a record of pax
        add(archive, f"{LONG[form]}1.png", b"q" * 512)
        add(archive, "sparse.png", b"has no place of its own", type=tarfile.GNUTYPE_SPARSE)
        add(archive, "of the old kind", b"o", type=tarfile.AREGTYPE)
        add(archive, "empty.cls", b"")
        add(archive, "猫.png", b"r" * 3, mtime=1.5)  # ustar and GNU keep the bytes; pax needs a record for both
        add(archive, "n" * 100, b"as long as a plain name can be")
        add(archive, "last.png", b"s")


@pytest.mark.parametrize("form", FORMATS)
def test_the_files_are_those_that_tarfile_finds(tmp_path, form):
    write_every_kind(tmp_path / "a.tar", form)
    expected = by_tarfile(tmp_path / "a.tar")
    assert len(expected) == 9 and found(tmp_path / "a.tar") == expected


@pytest.mark.parametrize("form", FORMATS)
def test_a_file_cut_between_two_members_is_named(tmp_path, form):
    path = tmp_path / "a.tar"
    write_every_kind(path, form)
    last = by_tarfile(path)[-1]
    whole = path.read_bytes()
    for end in (last.offset - BLOCK, last.offset + BLOCK):  # before the header of the last file, and behind it
        path.write_bytes(whole[:end])
        with pytest.raises(tarfile.ReadError, match="ends without the empty blocks that close a tar file"):
            found(path)
    path.write_bytes(whole[: last.offset + 2 * BLOCK])  # one of the two is enough: some programs count on it
    assert found(path)[-1] == last


def test_a_global_header_counts_for_all_that_follow(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w", pax_headers={"path": "renamed.png"}) as archive:
        add(archive, "0.png")
        add(archive, "1.png")
    assert found(tmp_path / "a.tar") == by_tarfile(tmp_path / "a.tar")
    assert [member.name for member in found(tmp_path / "a.tar")] == ["renamed.png", "renamed.png"]


def test_sizes_are_read_as_tarfile_reads_them(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        add(archive, "0.png", b"abc")
        add(archive, "1.png", b"d")
    content = bytearray((tmp_path / "a.tar").read_bytes())
    for size in (b"\x80\0\0\0\0\0\0\0\0\0\0\3", b"        3\0\0\0", b"00000000003\0"):
        content[124:136], content[148:156] = size, b" " * 8
        content[148:156] = b"%06o\0 " % sum(content[:512])
        (tmp_path / "a.tar").write_bytes(content)
        expected = [Member("0.png", 512, 3), Member("1.png", 1536, 1)]
        assert found(tmp_path / "a.tar") == by_tarfile(tmp_path / "a.tar") == expected


def plain_shard(path, form=tarfile.PAX_FORMAT):
    """Write four samples of five blocks: a header and the label, a header and two blocks of the image."""
    with tarfile.open(path, "w", format=form) as archive:
        for number in range(4):
            add(archive, f"{number}.cls", b"1")
            add(archive, f"{number}.png", b"p" * 700)
    return bytearray(path.read_bytes())


@pytest.mark.parametrize("form", ["ustar", "gnu"])
def test_plain_headers_are_read_without_tarfile(tmp_path, monkeypatch, form):
    asked, real = [], tarfile.TarFile.next
    plain_shard(tmp_path / "a.tar", FORMATS[form])
    monkeypatch.setattr(tarfile.TarFile, "next", lambda archive: asked.append(archive.offset) or real(archive))
    assert len(found(tmp_path / "a.tar")) == 8
    assert asked == [0, 4 * 5 * BLOCK]  # as it is opened, and where no header is


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda content: content[:2559], r"0\.png goes on after its end"),
        (lambda content: content[:2561], "there is no header at byte 2,560"),
        (lambda content: content[:3072], r"1\.cls goes on after its end"),
        (lambda content: content[:3073], r"1\.cls goes on after its end"),
        (lambda content: content[:2560] + b"\xff" + content[2561:], "there is no header at byte 2,560"),
        (lambda content: content[:2690] + b"7" + content[2691:], "there is no header at byte 2,560"),
        (lambda content: b"\xff" + content[1:], "bad checksum"),
        (lambda content: content[:100], "truncated header"),
        (lambda content: b"no tar file" * 100, "invalid header|bad checksum"),
    ],
)
def test_damaged_tar_is_refused(tmp_path, damage, reason):
    content = plain_shard(tmp_path / "a.tar")
    (tmp_path / "a.tar").write_bytes(damage(content))
    with pytest.raises(DataError, match=rf"a\.tar: is not a complete tar file: ({reason})"):
        shard_rows.scan_tar(tmp_path / "a.tar", ShardQuery())


@pytest.mark.parametrize(
    ("files", "message"),
    [
        *(
            ({"0.cls": label, "0.png": b"x"}, r"0\.cls: holds b'.*', which is not a label")
            for label in (b"1" * 1001, b"", b" \n", b"cat\ndog", b"\xff\xfe3\0", b"3\0")
        ),
        ({"a.png": b"x", "a.PNG": b"x", "a.cls": b"1"}, r"a\.tar: a.PNG: occurs twice in one sample"),
    ],
)
def test_unusable_sample_is_refused(tmp_path, files, message):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, content in files.items():
            add(archive, name, content)
    with pytest.raises(DataError, match=message):
        shard_rows.scan_tar(tmp_path / "a.tar", ShardQuery())


@pytest.mark.parametrize(
    ("names", "labels", "left_out"),
    [
        ("d/._a.png d/a.png d/._a.cls d/a.cls", "d/a.cls", {"file(s) whose names begin with a dot": 2}),
        ("a.png README a.cls", "a.cls", {"file(s) without an ending": 1}),
        ("a.png a.json a.PNG.bak a.cls", "a.cls", {".json": 1, ".png.bak": 1}),
        ("a.jpg a.png a.cls", "a.cls", {"image(s) after the first of a sample": 1}),
        ("a.v1.png a.cls a.v2.png", "", {"file(s) of samples without an image or a .cls": 3}),
        ("a.png b.png a.cls b.cls", "", {"file(s) of samples without an image or a .cls": 4}),
        ("a.png a.cls b.png b.cls a.png a.cls", "a.cls b.cls a.cls", {}),
        ("d\\a.png d\\a.cls e/a.png e/a.cls x.y/a.png x.y/a.cls", "d\\a.cls e/a.cls x.y/a.cls", {}),
    ],
)
def test_samples_are_grouped_as_webdataset_does(tmp_path, names, labels, left_out):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in names.split():
            add(archive, name, name.encode())
    found = shard_rows.scan_tar(tmp_path / "a.tar", ShardQuery())
    assert (found.labels, found.left_out) == (labels.split(), left_out)
    images = [(tmp_path / "a.tar").read_bytes()[first : first + size].decode() for first, size in found.where.tolist()]
    assert [image.partition(".")[0] for image in images] == [label.partition(".")[0] for label in labels.split()]
