"""Checksums of a checkpoint's files, computed while they are written and compared before they are read.

    checksums.json    {"__0_0.distcp": {"bytes": 1048576, "crc32": "8d6f2c10"}, "run.json": ...}

CRC-32 finds every flipped bit and every damaged run of up to 32 bits. It is no protection against intent: whoever
changes a file on purpose can change its checksum too. Needs no framework.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

FILE = "checksums.json"
_CHUNK_BYTES = 256 << 10


class Checksum(NamedTuple):
    """Size and CRC-32 of a file."""

    bytes: int
    crc32: str


class ChecksumFile:
    """A file open for sequential writing that sums the bytes written so far."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._bytes = self._crc = 0

    def write(self, data: Any) -> int:
        """Write ``data``, any buffer, in pieces that are summed and written while they are in the cache."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _CHUNK_BYTES):
            part = view[start : start + _CHUNK_BYTES]
            self._crc = zlib.crc32(part, self._crc)
            self._file.write(part)
        self._bytes += len(view)
        return len(view)

    def __getattr__(self, name: str) -> Any:  # tell, flush, fileno, close
        return getattr(self._file, name)

    @property
    def checksum(self) -> Checksum:
        """Return the checksum of everything written."""
        return Checksum(self._bytes, f"{self._crc:08x}")


@contextmanager
def open_with_checksum(path: Path, sums: dict[str, Checksum]) -> Iterator[ChecksumFile]:
    """Open ``path`` for writing; when its last byte is on the disk, put its checksum into ``sums``."""
    with open(path, "wb") as file:
        summed = ChecksumFile(file)
        yield summed
        file.flush()
        os.fsync(file.fileno())
    sums[path.name] = summed.checksum


def write_durably(path: Path, text: str) -> Checksum:
    """Replace the content of ``path`` by ``text`` atomically and durably, so that it survives a crash."""
    sums: dict[str, Checksum] = {}
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with open_with_checksum(aside, sums) as file:
        file.write(text.encode())
    os.replace(aside, path)
    return sums[aside.name]


def write_checksums(folder: Path, sums: Mapping[str, Checksum]) -> None:
    """Add the checksums of files in ``folder`` to those recorded there."""
    known = read(folder) | dict(sums)
    entries = {name: known[name]._asdict() for name in sorted(known)}
    write_durably(folder / FILE, json.dumps(entries, indent=1) + "\n")


def has_checksums(folder: Path) -> bool:
    """Return whether the checkpoint ``folder`` has checksums; older ones, and those of MindSpeed-MM, have none."""
    return (folder / FILE).is_file()


def read(folder: Path) -> dict[str, Checksum]:
    """Return the recorded checksums of the files in ``folder``; empty if there are none.

    Raises:
        ValueError: the checksums themselves are damaged.
    """
    if not has_checksums(folder):
        return {}
    try:
        content = json.loads((folder / FILE).read_bytes())
        return {name: Checksum(int(entry["bytes"]), str(entry["crc32"])) for name, entry in content.items()}
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def find_damage(folder: Path, rank: int = 0, world_size: int = 1) -> str | None:
    """Return what is wrong with the first damaged file of ``folder``, or None.

    ``rank`` of ``world_size`` reads every ``world_size``-th file, so that the ranks of a run share the reading.
    """
    try:
        sums = sorted(read(folder).items())
    except (OSError, ValueError) as error:
        return f"{FILE} cannot be read: {error}"
    problems = (_problem(folder / Path(name).name, expected) for name, expected in sums[rank::world_size])
    return next(filter(None, problems), None)


def find_file_damage(path: Path) -> str | None:
    """Return how the file ``path`` of a checkpoint is damaged, or None."""
    try:
        expected = read(path.parent).get(path.name)
    except (OSError, ValueError) as error:
        return f"{FILE} cannot be read: {error}"
    return None if expected is None else _problem(path, expected)


def _problem(path: Path, expected: Checksum) -> str | None:
    if not path.is_file():
        return f"{path.name} is missing"
    try:
        size = path.stat().st_size
        if size != expected.bytes:
            return f"{path.name} is {'cut short' if size < expected.bytes else 'too long'}"
        if _checksum_file(path) != expected:
            return f"{path.name} does not match its checksum"
    except OSError as error:
        return f"{path.name} cannot be read: {error}"
    return None


def _checksum_file(path: Path) -> Checksum:
    size, crc, buffer = 0, 0, memoryview(bytearray(_CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            size, crc = size + count, zlib.crc32(buffer[:count], crc)
    return Checksum(size, f"{crc:08x}")
