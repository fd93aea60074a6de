"""``.safetensors`` files as dicts of arrays, without any framework; bfloat16 and float8 are read as float32.

The file holds the length of a JSON header (8 bytes), the header (name -> dtype, shape, offsets), and the numbers.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mindspeed_mm_dit.configs.files import UnusableFile, read_safetensors_header
from mindspeed_mm_dit.errors import CheckpointError

STORED = {"bfloat16": "<u2", "float8_e4m3fn": "u1", "float8_e5m2": "u1"}
"""PyTorch's name of each, and the dtype of whole numbers that holds its bits."""


_LOW = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
_DTYPES = {
    **{"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1"},
    **{"U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?"},
    **{name: STORED[_LOW[name]] for name in _LOW},
}


def read_safetensors_file(
    path: str | Path,
    select: Callable[[Collection[str]], Collection[str]] = lambda names: names,
    most_entries: int = sys.maxsize,
    as_bits: bool = False,
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return the arrays, as views of the file, and the metadata of its header; bfloat16 and float8 come as float32.

    select: returns which of the names in the file to read. as_bits: bfloat16 and float8 come as whole numbers that hold
    their bits, in the dtypes of ``STORED``, without a copy.

    Raises:
        CheckpointError: no such file, cut short, not of this format, of an unsupported dtype, or an array of
            more than ``most_entries``.
    """
    try:
        header = read_safetensors_header(path)
        data = np.memmap(path, np.uint8, "c").view(np.ndarray)[header.start :]
        tensors = {name: header.tensors[name] for name in select(header.tensors)}
        if large := [name for name, entry in tensors.items() if math.prod(entry["shape"]) > most_entries]:
            raise ValueError(f"{large[0]} has more than {most_entries:,} entries")
        arrays = {name: _array(data, f"{path}: {name}", entry, as_bits) for name, entry in tensors.items()}
        return arrays, header.metadata
    except UnusableFile as problem:
        raise CheckpointError(f"{path} {problem}. Copy or download it again.") from None
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {type(error).__name__}: {error}. Copy or download it again."
        ) from error


def _array(data: np.ndarray, what: str, entry: dict[str, Any], as_bits: bool) -> np.ndarray:
    if entry["dtype"] not in _DTYPES:
        raise CheckpointError(
            f"{what} is of dtype {entry['dtype']}, which is not supported. Save it as one of {', '.join(_DTYPES)}."
        )
    (begin, end), shape, dtype = entry["data_offsets"], entry["shape"], np.dtype(_DTYPES[entry["dtype"]])
    if len(shape) > 32 or min(shape, default=0) < 0 or end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{what} takes {end - begin} bytes, which are not those of {shape}")
    array = data[begin:end].view(dtype).reshape(shape)
    kind = None if as_bits else _LOW.get(entry["dtype"])
    return np.require(widen(array, kind) if kind else array, requirements="A")


class StoredTensor(NamedTuple):
    """A tensor to write."""

    dtype: str
    """As the header names it."""
    shape: tuple[int, ...]
    array: Callable[[], np.ndarray]
    """Returns its numbers, or their bits, when they are written."""


_NAMES = {np.dtype(code): name for name, code in _DTYPES.items() if name not in _LOW}


def name_of_dtype(dtype: np.dtype[Any], what: str) -> str:
    """Return the header's name of a dtype of NumPy; raises CheckpointError, naming ``what``, if there is none."""
    if dtype not in _NAMES:
        raise CheckpointError(f"{what} is of dtype {dtype}, which no .safetensors file can hold.")
    return _NAMES[dtype]


def write_safetensors_file(path: str | Path, tensors: Mapping[str, StoredTensor], metadata: Mapping[str, str]) -> None:
    """Write a file, one tensor after another, those of larger numbers first, so that all are aligned.

    Raises OSError if the disk does not take it.
    """
    width = {name: np.dtype(_DTYPES[tensor.dtype]).itemsize for name, tensor in tensors.items()}
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    names, end = sorted(tensors, key=lambda name: (-width[name], name)), 0
    for name in names:
        dtype, shape, _ = tensors[name]
        begin, end = end, end + width[name] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, ensure_ascii=False).encode("utf-8", "surrogatepass")
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            data = np.ascontiguousarray(tensors[name].array()).reshape(-1).view(np.uint8)
            assert len(data) == header[name]["data_offsets"][1] - header[name]["data_offsets"][0], name
            file.write(data.data)


def widen(bits: np.ndarray, kind: str) -> np.ndarray:
    """Return the numbers whose ``bits`` are given as a dtype of ``STORED``: float32 of the same shape."""
    wide = _WIDEN[kind](np.atleast_1d(bits))  # (0-D arrays become scalars in arithmetic)
    return wide.reshape(bits.shape)


def _float8_e4m3fn(bits: np.ndarray) -> np.ndarray:
    """Read as float16, whose exponent counts from 15 and not from 7; the largest magnitude is NaN."""
    magnitude = bits & 0x7F
    half = ((bits & 0x80).astype(np.uint16) << 8 | magnitude.astype(np.uint16) << 7).view(np.float16)
    return np.where(magnitude == 0x7F, np.float32(np.nan), half.astype(np.float32) * np.float32(256))


_WIDEN: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "bfloat16": lambda bits: (bits.astype(np.uint32) << 16).view(np.float32),  # the upper half of a float32
    "float8_e4m3fn": _float8_e4m3fn,
    "float8_e5m2": lambda bits: (bits.astype(np.uint16) << 8).view(np.float16).astype(np.float32),  # and of a float16
}
