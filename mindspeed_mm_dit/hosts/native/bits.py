"""Floats of a batch as the integers of their bits: the engine casts floats to ``param_dtype`` on their way."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

PREFIX = "bits_of_"
_FLOATS = {torch.int32: torch.float32, torch.int64: torch.float64}


def packed(batch: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Return a batch as tensors; a float (...) of 32 or 64 bits becomes an integer, its name begins with PREFIX."""
    tensors = {}
    for name, array in batch.items():
        is_float = array.dtype.kind == "f"
        bits = array.view(f"int{8 * array.dtype.itemsize}") if is_float else array
        tensors[f"{PREFIX}{name}" if is_float else name] = torch.as_tensor(bits)
    return tensors


def unpacked(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the batch that :func:`packed` was given, wherever it is now."""
    return {
        name.removeprefix(PREFIX): value.view(_FLOATS[value.dtype]) if name.startswith(PREFIX) else value
        for name, value in batch.items()
    }
