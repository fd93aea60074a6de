"""Reads images from tar files in webdataset's layout: consecutive KEY.jpg and KEY.cls, whose text is the label.

Captions are KEY.txt, one per line, or KEY.json, an object with texts. A key ends at the first dot of a file's name.
Files whose names begin with a dot, such as the companions that macOS writes, or have none belong to no sample.
"""

from __future__ import annotations

import os
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from mindspeed_mm_dit.configs.files import UnusableFile, check_file, reason_of
from mindspeed_mm_dit.configs.limits import short_repr
from mindspeed_mm_dit.data.image_captions import (
    ImageCaptions,
    check_size,
    endings_of,
    merge_captions,
    parse_caption_file,
)
from mindspeed_mm_dit.data.shard_scan import Scanned, ShardQuery
from mindspeed_mm_dit.data.transforms import readable_formats
from mindspeed_mm_dit.errors import DataError

LABEL = ".cls"
MOST_LABEL_BYTES = 1000
BLOCK = tarfile.BLOCKSIZE
READ_BYTES = 1 << 15
"""Buffer size: enough for several headers of small images, little compared with large images."""


class Member(NamedTuple):
    """A file in a tar file."""

    name: str
    offset: int
    size: int


def scan_tar(path: Path, query: ShardQuery) -> Scanned:
    """Return labels, captions and positions (offset, bytes) of the samples of a file. No image is read.

    Raises:
        DataError: it is not a tar file, or is cut short; a label is not valid; or a sample has two files of one name.
    """
    labels: list[str] = []
    where: list[tuple[int, int]] = []
    captions: list[ImageCaptions] = []
    left_out: Counter[str] = Counter()
    needed = {LABEL} if query.label else set()
    used = needed | {ending.lower() for ending in endings_of(query.captions)}
    try:
        check_file(path)
        with open(path, "rb", READ_BYTES) as file:
            for sample in _samples(path, members(file), left_out):
                images = [ending for ending in sample if ending in readable_formats()]
                if not images or not needed <= set(sample):
                    left_out[" or a ".join(("file(s) of samples without an image", *needed))] += len(sample)
                    continue
                image = sample[images[0]]
                labels.append(_label(path, file, sample[LABEL]) if query.label else "")
                where.append((image.offset, image.size))
                captions += [_captions_of(file, image, sample, query.captions)] if query.captions else []
                left_out["image(s) after the first of a sample"] += len(images) - 1
                left_out.update(set(sample) - used - set(images))
    except (tarfile.TarError, UnusableFile, OSError, ValueError) as error:
        raise DataError(str(path), f"is not a complete tar file: {reason_of(error)}", "fetch it again") from None
    return Scanned(labels, np.array(where, np.int64).reshape(-1, 2), left_out=+left_out, captions=captions)


class TarReader:
    """Reads images by their position; safe to call from several threads."""

    def read(self, path: Path, offset: int, size: int) -> bytes:
        """Return the image file at this position; raises UnusableFile."""
        check_file(path)
        try:
            content = _read(path, offset, size)
        except OSError as error:
            raise UnusableFile(f"cannot be read: {reason_of(error)}") from None
        if len(content) < size:
            raise UnusableFile(f"is cut short: {path.name} ends within it")
        return content


def members(file: BinaryIO) -> Iterator[Member]:
    """Yield the files of a tar file in order; the caller may seek in ``file`` in between.

    Plain headers are parsed here, all others by tarfile, which is far slower.

    Raises:
        tarfile.TarError: it is not a tar file, is cut short, or lacks a header where one should be.
    """
    end, position = os.fstat(file.fileno()).st_size, 0
    with tarfile.open(fileobj=file, mode="r:") as archive:
        archive.firstmember = None  # type: ignore[attr-defined]  # (opening has read it; read it again)
        while parsed := _member_at(position, file, archive):
            member, position, is_file = parsed
            if position > end:
                raise tarfile.ReadError(f"{member.name} goes on after its end")
            if is_file:
                yield member
    file.seek(position)
    block = file.read(BLOCK)
    if block.strip(b"\0"):
        raise tarfile.ReadError(f"there is no header at byte {position:,}")
    if not block:  # a complete tar file ends with two blocks of zeros
        raise tarfile.ReadError("it ends without the empty blocks that close a tar file, so more may be missing")


def _member_at(position: int, file: BinaryIO, archive: tarfile.TarFile) -> tuple[Member, int, bool] | None:
    """Return the member whose header is at ``position``, its end, and whether it is a file; None if there is none."""
    file.seek(position)
    member = None if archive.pax_headers else _plain(file.read(BLOCK), position)
    if member:
        return member, member.offset + -(-member.size // BLOCK) * BLOCK, True
    file.seek(position)
    archive.offset = position
    info = archive.next()
    archive.members = []  # type: ignore[attr-defined]  # (else tarfile keeps them all)
    if info is None:
        return None
    return Member(info.name, info.offset_data, info.size), archive.offset, info.isfile() and not info.issparse()


def _plain(header: bytes, position: int) -> Member | None:
    """Return the file of a plain header at ``position``; None for any other header.

    A plain header describes a regular file with a name of up to 100 bytes and its size in octal digits, as in POSIX
    ustar and GNU tar.
    """
    if len(header) < BLOCK or header[156:157] != b"0" or header[257:262] != b"ustar" or header[345]:
        return None
    try:
        size, checksum = (int(field.partition(b"\0")[0], 8) for field in (header[124:136], header[148:156]))
    except ValueError:
        return None
    # The checksum is the sum of all bytes, with its own eight bytes counted as spaces. The lower half of Adler-32 is
    # 1 + the sum of all bytes, modulo 65521.
    if size < 0 or (checksum - 8 * 32 + sum(header[148:156]) + 1) % 65521 != zlib.adler32(header) & 0xFFFF:
        return None
    name = header[:100].partition(b"\0")[0].decode(tarfile.ENCODING, "surrogateescape")
    return Member(name, position + BLOCK, size)


def _samples(path: Path, files: Iterator[Member], left_out: Counter[str]) -> Iterator[dict[str, Member]]:
    """Yield the files of each sample, by ending in small letters: consecutive files that share folder and key.

    ``left_out`` counts the files that belong to none.
    """
    sample: dict[str, Member] = {}
    current = None
    for member in files:
        folder, _, name = member.name.rpartition("/")
        key, dot, ending = name.partition(".")
        if not key or not dot:
            left_out["file(s) whose names begin with a dot" if dot else "file(s) without an ending"] += 1
            continue
        if (folder, key) != current and sample:
            yield sample
            sample = {}
        current, ending = (folder, key), (dot + ending).lower()
        if ending in sample:
            raise DataError(
                f"{path}: {member.name}", "occurs twice in one sample", "write the tar again with one of them"
            )
        sample[ending] = member
    if sample:
        yield sample


def _label(path: Path, file: BinaryIO, member: Member) -> str:
    file.seek(member.offset)
    content = file.read(min(member.size, MOST_LABEL_BYTES + 1))
    with suppress(UnicodeDecodeError):
        label = content.decode("utf-8-sig").strip()
        if len(content) <= MOST_LABEL_BYTES and label and not set(label) & set("\n\r\0"):
            return label
    cure = "write a number or a name, in one line"
    raise DataError(f"{path}: {member.name}", f"holds {short_repr(content)}, which is not a label", cure)


def _captions_of(file: BinaryIO, image: Member, sample: dict[str, Member], locations: tuple[str, ...]) -> ImageCaptions:
    """Return the captions of a sample from its files at ``locations``."""
    parts = []
    for location in locations:
        member = sample.get(location.partition(":")[0].lower())
        if member is not None:
            check_size(member.name, member.size)
            file.seek(member.offset)
            parts.append(parse_caption_file(member.name, file.read(member.size), location))
    stem = image.name.rpartition("/")[2].partition(".")[0]
    return merge_captions(parts, [stem + location for location in locations])


def _read(path: Path, offset: int, size: int) -> bytes:
    with open(path, "rb") as file:
        return os.pread(file.fileno(), size, offset)
