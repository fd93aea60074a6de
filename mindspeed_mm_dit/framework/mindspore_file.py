"""MindSpore's ``.ckpt`` files as dicts of arrays, read and written without MindSpore.

The file is one protobuf message: field 1, repeated, holds an entry ``{1: name, 2: {1: dims, 2: type, 3: bytes}}``.
An array of more than 512 MiB is cut into several entries of the same name, each with the dims of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.framework.safetensors_file import STORED, widen

T = TypeVar("T")

_DTYPES = {
    **{"Float64": "<f8", "Float32": "<f4", "Float16": "<f2", "BFloat16": STORED["bfloat16"], "Bool": "?"},
    **{"Int64": "<i8", "Int32": "<i4", "Int16": "<i2", "Int8": "<i1"},
    **{"UInt64": "<u8", "UInt32": "<u4", "UInt16": "<u2", "UInt8": "<u1"},
}
_TYPES = {np.dtype(code): name for name, code in _DTYPES.items() if name != "BFloat16"}
_SLICE_BYTES = 512 << 20
_CHECKSUM = b"crc_num"


class Writable(Protocol):
    """A file open for writing bytes."""

    @property
    def name(self) -> Any:
        """Its path."""

    def write(self, data: Any, /) -> int:
        """Write any buffer."""


def read_mindspore_file(path: str | Path) -> dict[str, np.ndarray]:
    """Read every array of what ``mindspore.save_checkpoint`` wrote; strings in it are skipped.

    Arrays are views of the file; writing to one leaves the file as it is. bfloat16 comes as float32.

    Raises:
        CheckpointError: no such file, cut short, encrypted, or not of this format.
    """
    return _read(path, _join)


def shapes_in_mindspore_file(path: str | Path) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every array of such a file; the arrays stay on disk. Raises CheckpointError, too."""
    return _read(path, lambda cut: cut[0][0])


_Entry = tuple[tuple[int, ...], str, np.ndarray]
"""Dims of the whole array, its type, and the bytes of this part of it."""


def _read(path: str | Path, make: Callable[[list[_Entry]], T]) -> dict[str, T]:
    """Return the result of ``make`` on the entries of each name."""
    try:
        parts: dict[str, list[_Entry]] = {}
        for _, entry in _fields(np.memmap(path, np.uint8, "c").view(np.ndarray)):
            (_, name), (_, tensor) = _fields(entry)
            parts.setdefault(_text(name), []).append(_tensor(tensor))
        return {name: make(cut) for name, cut in parts.items() if cut[0][1] != "str"}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is not a whole MindSpore checkpoint: {type(error).__name__}: {error}. Copy it again; encrypted "
            "ones cannot be read."
        ) from error


def _fields(data: np.ndarray) -> Iterator[tuple[int, Any]]:
    """Yield (field number, bytes or integer) of one protobuf message."""
    at = 0
    while at < len(data) and data[at : at + 7].tobytes() != _CHECKSUM:
        key, at = _varint(data, at)
        value, at = _varint(data, at)
        if key & 7 == 0:
            yield key >> 3, value
            continue
        if key & 7 != 2 or at + value > len(data):
            raise ValueError(f"a field of {value} bytes at byte {at} of {len(data)}")
        yield key >> 3, data[at : at + value]
        at += value


def _varint(data: np.ndarray, at: int) -> tuple[int, int]:
    """Return (integer at byte ``at``, position of the byte behind it)."""
    value, shift = 0, 0
    while True:
        if shift > 63:
            raise ValueError(f"a number of too many bytes at byte {at}")
        byte = int(data[at])
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at


def _tensor(message: np.ndarray) -> _Entry:
    fields = list(_fields(message))
    dims = tuple(int(value) for number, value in fields if number == 1)
    (kind,), (content,) = ([value for number, value in fields if number == field] for field in (2, 3))
    return dims, _text(kind), content


def _text(data: np.ndarray) -> str:
    return data.tobytes().decode()


def _join(cut: list[_Entry]) -> np.ndarray:
    dims, kind, content = cut[0] if len(cut) == 1 else (*cut[0][:2], np.concatenate([part[2] for part in cut]))
    array = content.view(_DTYPES[kind])
    return np.require((widen(array, "bfloat16") if kind == "BFloat16" else array).reshape(dims), requirements="A")


def write_mindspore_file(path: str | Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays, byte for byte as ``mindspore.save_checkpoint`` does."""
    with open(path, "wb") as file:
        write_mindspore_arrays(file, arrays)


def write_mindspore_arrays(file: Writable, arrays: Mapping[str, np.ndarray]) -> None:
    """Write what :func:`write_mindspore_file` writes into an open file."""
    for name, array in arrays.items():
        if array.dtype not in _TYPES:
            raise CheckpointError(f"{file.name} cannot hold {name}: MindSpore has no tensors of {array.dtype}.")
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        head = b"".join(b"\x08" + _as_varint(size) for size in array.shape)
        head += b"\x12" + _with_length(_TYPES[array.dtype].encode())
        for start in range(0, max(len(data), 1), _SLICE_BYTES):
            part = data[start : start + _SLICE_BYTES]
            before = head + b"\x1a" + _as_varint(len(part))
            name_and_tensor = b"\x0a" + _with_length(name.encode()) + b"\x12" + _as_varint(len(before) + len(part))
            total = len(name_and_tensor) + len(before) + len(part)
            file.write(b"\x0a" + _as_varint(total) + name_and_tensor + before)
            file.write(part.data)


def _with_length(content: bytes) -> bytes:
    return _as_varint(len(content)) + content


def _as_varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
