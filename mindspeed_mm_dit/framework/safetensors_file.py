"""``.safetensors`` files as dicts of arrays, read without any framework; bfloat16 and float8 become float32.

The file holds the length of a JSON header (8 bytes), the header (name -> dtype, shape, offsets), and the numbers.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

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
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return the arrays, as views of the file, and the metadata of its header; bfloat16 and float8 come as float32.

    select: returns which of the names in the file to read.

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
        return {name: _array(data, f"{path}: {name}", entry) for name, entry in tensors.items()}, header.metadata
    except UnusableFile as problem:
        raise CheckpointError(f"{path} {problem}. Copy or download it again.") from None
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {type(error).__name__}: {error}. Copy or download it again."
        ) from error


def _array(data: np.ndarray, what: str, entry: dict[str, Any]) -> np.ndarray:
    if entry["dtype"] not in _DTYPES:
        raise CheckpointError(
            f"{what} is of dtype {entry['dtype']}, which is not supported. Save it as one of {', '.join(_DTYPES)}."
        )
    (begin, end), shape, dtype = entry["data_offsets"], entry["shape"], np.dtype(_DTYPES[entry["dtype"]])
    if len(shape) > 32 or min(shape, default=0) < 0 or end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{what} takes {end - begin} bytes, which are not those of {shape}")
    array = data[begin:end].view(dtype).reshape(shape)
    kind = _LOW.get(entry["dtype"])
    return np.require(widen(array, kind) if kind else array, requirements="A")


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
