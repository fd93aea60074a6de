"""Reads files, regular ones only: anything that could block or never end is reported and not opened."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from mindspeed_mm_dit.errors import DataError

_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISDIR, "is a folder, not a file"),
    (stat.S_ISFIFO, "is a named pipe, not a file"),
    (stat.S_ISSOCK, "is a socket, not a file"),
    (stat.S_ISCHR, "is a device, not a file"),
    (stat.S_ISBLK, "is a device, not a file"),
)


class UnusableFile(Exception):
    """A file that cannot be used; the message continues the file's name: "is a named pipe, not a file"."""


class Digest(Protocol):
    """A digest of :mod:`hashlib` that data can be added to."""

    def update(self, data: bytes, /) -> None:
        """Add ``data``."""


def check_file(path: str | Path) -> int:
    """Return the size of ``path`` in bytes; raises UnusableFile unless it is a regular file."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        raise UnusableFile("is a link to nothing" if os.path.islink(path) else "is listed but missing") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        raise UnusableFile(f"cannot be read: {reason_of(error)}") from None
    for is_kind, words in _KINDS:
        if is_kind(found.st_mode):
            raise UnusableFile(words)
    return found.st_size


def is_folder(path: Path) -> bool:
    """Return whether ``path`` is an accessible folder."""
    try:
        return path.is_dir()
    except OSError:  # a name that is too long, or a parent folder without permission
        return False


def read_bytes(path: str | Path) -> bytes:
    """Return the content of a regular file; raises UnusableFile."""
    check_file(path)
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UnusableFile(f"cannot be read: {reason_of(error)}") from None


def reason_of(error: Exception) -> str:
    """Return the text of an error, without the error number and file name of system errors."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def add_content(digest: Digest, path: str | Path) -> None:
    """Add the bytes of a regular file to ``digest``; raises UnusableFile."""
    check_file(path)
    try:
        with open(path, "rb") as stream:
            while chunk := stream.read(1 << 22):
                digest.update(chunk)
    except OSError as error:
        raise UnusableFile(f"cannot be read: {reason_of(error)}") from None


def digest_of(path: str | Path) -> bytes:
    """Return a digest of the content of a regular file; raises UnusableFile."""
    digest = hashlib.blake2b(digest_size=16)
    add_content(digest, path)
    return digest.digest()


def digest_of_files(path: str, setting: str = "ae.from_pretrained") -> str:
    """Return the SHA-256 over the weights and config files at ``path``, a folder or one file; ``setting`` names it."""
    root = Path(path)
    if not root.exists():
        raise DataError(f"{setting} = {path}", "there is no such file or folder", "correct the path")
    suffixes = {".json", ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".model"}
    files = sorted(file for file in root.iterdir() if file.suffix in suffixes) if root.is_dir() else [root]
    found = []
    for file in files:
        try:
            found.append((str(file.absolute()), check_file(file), os.stat(file).st_mtime_ns))
        except UnusableFile as problem:
            raise DataError(f"{setting} = {path}", f"{file} {problem}", "copy the files again") from None
    return _digest_of_all(tuple(found))


@lru_cache(maxsize=8)
def _digest_of_all(files: tuple[tuple[str, int, int], ...]) -> str:
    """Return the SHA-256 over files (path, bytes, modification time); unchanged files are read only once."""
    digest = hashlib.sha256()
    for path, _, _ in files:
        add_content(digest, path)
    return digest.hexdigest()


def check_safetensors(path: str | Path) -> tuple[str, ...]:
    """Return the names of the tensors in a .safetensors file; only its header is read.

    Raises UnusableFile if it is not such a file, or does not have the size that its header implies.
    """
    size = check_file(path)
    try:
        with open(path, "rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            if not 8 < start <= size:
                raise ValueError(f"the file has {size:,} bytes, its header ends at {start:,}")
            header = json.loads(file.read(start - 8))
        header.pop("__metadata__", None)
        end = start + max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UnusableFile(f"cannot be read: {reason_of(error)}") from None
    if size != end:
        raise UnusableFile(f"is cut short, or damaged: it has {size:,} bytes, and its header speaks of {end:,}")
    return tuple(header)
