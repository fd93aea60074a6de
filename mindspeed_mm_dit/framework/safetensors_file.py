"""``.safetensors`` files as dicts of arrays, read without any framework; bfloat16, which NumPy lacks, too.

The file holds the length of a JSON header (8 bytes), the header (name -> dtype, shape, offsets), and the numbers.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit.errors import CheckpointError

_DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?",
}  # fmt: skip


def read_safetensors_file(path: str | Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return the arrays, as views of the file, and the metadata of its header; bfloat16 comes as float32.

    Raises:
        CheckpointError: no such file, cut short, or not of this format.
    """
    try:
        data = np.memmap(path, np.uint8, "c").view(np.ndarray)
        start = 8 + int(data[:8].view("<u8")[0])
        if start > len(data):
            raise ValueError(f"the file has {len(data)} bytes, its header ends at {start}")
        header = json.loads(data[8:start].tobytes())
        metadata = _metadata(header.pop("__metadata__", {}))
        return {name: _array(data[start:], entry) for name, entry in header.items()}, metadata
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        reason = f"cannot be read: {type(error).__name__}: {error}"
        raise CheckpointError(str(path), reason, "copy or download it again") from error


def _metadata(found: Any) -> dict[str, str]:
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ValueError("its __metadata__ are no strings by name")
    return found


def _array(data: np.ndarray, entry: dict[str, Any]) -> np.ndarray:
    begin, end = entry["data_offsets"]
    dtype = np.dtype(_DTYPES[entry["dtype"]])
    if end > len(data) or end - begin != math.prod(entry["shape"]) * dtype.itemsize:
        raise ValueError(f"the file has {len(data)} bytes of tensors, one of {entry['shape']} ends at {end}")
    array = data[begin:end].view(dtype).reshape(entry["shape"])
    if entry["dtype"] == "BF16":  # the upper half of a float32
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return np.require(array, requirements="A")
