"""Numbers of so few bits that NumPy has no type for them, as float32, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

STORED = {"bfloat16": "<u2", "float8_e4m3fn": "u1", "float8_e5m2": "u1"}
"""PyTorch's name of each, and the dtype of whole numbers that holds its bits."""


def widened(bits: np.ndarray, kind: str) -> np.ndarray:
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
