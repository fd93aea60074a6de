"""Convert between pixels (uint8 from 0 to 255) and images (float from -1 to 1)."""

from __future__ import annotations

from typing import Any

import numpy as np

from mindspeed_mm_dit.framework import ops

Tensor = Any


def to_images(pixels: Tensor) -> Tensor:
    """Pixels (B, C, ...) uint8 -> images (B, C, ...) float32 in [-1, 1]."""
    return ops.to_float32(pixels) / 127.5 - 1.0


def to_pixels(images: np.ndarray) -> np.ndarray:
    """Images (B, C, ...) float, about in [-1, 1] -> pixels of the same shape, uint8; values outside are clipped."""
    return np.clip(images * 127.5 + 128.0, 0, 255).astype(np.uint8)
