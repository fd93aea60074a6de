"""NumPy's files, ``.npy`` and ``.npz``, as arrays; their headers are compared with the file before anything is read."""

from __future__ import annotations

import lzma
import math
import tokenize
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from mindspeed_mm_dit.configs.files import UnusableFile, check_file, check_unfolded, reason_of

UNREADABLE = (
    ValueError, OSError, EOFError, LookupError, TypeError, RuntimeError, MemoryError, zlib.error, zipfile.BadZipFile,
    lzma.LZMAError, tokenize.TokenError,
)  # fmt: skip
"""Errors that reading a damaged or encrypted file raises."""


class Header(NamedTuple):
    """The header of an .npy file."""

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype


def read_npy(path: str | Path) -> np.ndarray:
    """Read an .npy without objects; raises UnusableFile."""
    size = check_file(path)
    try:
        with open(path, "rb") as file:
            read_header(file, size)
            file.seek(0)
            return np.load(file, allow_pickle=False)
    except UNREADABLE as error:
        raise UnusableFile(f"cannot be read: {reason_of(error)}") from None


def read_npz(path: str | Path, names: Iterable[str] | None = None) -> dict[str, np.ndarray]:
    """Read the arrays of an .npz by name, or only ``names``.

    Raises UnusableFile if one is not an array of numbers or text, is encrypted, or unpacks to far more than the file.
    """
    size = check_file(path)
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            selected = {name: members[name] for name in members if names is None or name in names}
            for info in selected.values():
                with archive.open(info) as member:
                    read_header(member, info.file_size)
        check_unfolded(size, sum(info.file_size for info in selected.values()))
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in selected}
    except UNREADABLE as error:
        raise UnusableFile(f"cannot be read: {reason_of(error)}") from None


def read_header(file: IO[bytes], size: int) -> Header:
    """Read the header of an .npy of ``size`` bytes; raises UnusableFile unless its array fills the rest of them."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    header = Header(*read(file))
    if header.dtype.hasobject:
        raise UnusableFile("cannot be read: arrays of Python objects are never loaded")
    num_bytes, expected = size - file.tell(), math.prod(header.shape) * header.dtype.itemsize
    if num_bytes != expected:
        raise UnusableFile(f"holds {num_bytes:,} bytes of data, expected {expected:,}")
    return header
