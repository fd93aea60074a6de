"""One set of weights as ``.safetensors``; facts of the run and diffusers' config travel in its header."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit.checkpoint.state import Arrays, State
from mindspeed_mm_dit.errors import CheckpointError

_DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?",
}  # fmt: skip


def fits(path: Path) -> bool:
    """Return whether ``path`` is a safetensors file, by its ending."""
    return path.is_file() and path.suffix == ".safetensors"


def read(path: Path) -> State:
    """Read a file; bfloat16, which NumPy lacks, comes as float32."""
    arrays, metadata = read_arrays(path)
    known = {key: json.loads(metadata[key]) for key in ("facts", "config") if key in metadata}
    return State({"model": arrays}, **known)


def read_arrays(path: Path) -> tuple[Arrays, dict[str, str]]:
    """Return the arrays, as views of the file, and the metadata of its header."""
    try:
        data = np.memmap(path, np.uint8, "c").view(np.ndarray)
        start = 8 + int(data[:8].view("<u8")[0])
        header = json.loads(data[8:start].tobytes())
        metadata = header.pop("__metadata__", {})
        return {name: _array(data[start:], entry) for name, entry in header.items()}, metadata
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = f"cannot be read: {type(error).__name__}: {error}"
        raise CheckpointError(str(path), reason, "copy or download it again") from error


def _array(data: np.ndarray, entry: dict[str, Any]) -> np.ndarray:
    begin, end = entry["data_offsets"]
    dtype = np.dtype(_DTYPES[entry["dtype"]])
    if end > len(data) or end - begin != math.prod(entry["shape"]) * dtype.itemsize:
        raise ValueError(f"the file has {len(data)} bytes of tensors, one of {entry['shape']} ends at {end}")
    array = data[begin:end].view(dtype).reshape(entry["shape"])
    if entry["dtype"] == "BF16":  # the upper half of a float32
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return np.require(array, requirements="A")


def write(path: Path, state: State) -> None:
    """Write the weights."""
    known = {"facts": state.facts, "config": state.config}
    write_arrays(path, state.weights, {key: json.dumps(value) for key, value in known.items() if value})


def write_arrays(path: Path, arrays: Arrays, metadata: dict[str, str]) -> None:
    """Write a file as PyTorch's libraries expect it."""
    from safetensors.numpy import save_file

    whole = {name: np.require(array, requirements=["C", "A"]) for name, array in arrays.items()}
    save_file(whole, path, {"format": "pt", **metadata})
