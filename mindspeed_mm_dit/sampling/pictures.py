"""Samples as single pictures."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image


def png_of(image: np.ndarray) -> bytes:
    """Return an image (H, W, 3 or 1) uint8 as a PNG."""
    png = io.BytesIO()
    Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(png, "PNG")
    return png.getvalue()


def save_each(folder: Path, images: np.ndarray, labels: np.ndarray) -> None:
    """Write images (N, H, W, 3 or 1) uint8 as ``NUMBER_LABEL.png``: 000012_7.png is image 12, of class 7."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (image, label) in enumerate(zip(images, labels.tolist())):
        (folder / f"{number:06d}_{label}.png").write_bytes(png_of(image))
