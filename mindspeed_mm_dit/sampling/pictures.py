"""Samples as pictures: one of all, or one of each."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from mindspeed_mm_dit.sampling.clips import draw_strips
from mindspeed_mm_dit.sampling.grid import draw_grid


def draw_samples(samples: np.ndarray, titles: Sequence[str], per_title: int | None = None) -> Image.Image:
    """Lay out images (N, H, W, C) in rows of a title, or videos (N, F, H, W, C) as strips of their frames; uint8."""
    return draw_grid(samples, titles, per_title) if samples.ndim == 4 else draw_strips(samples, titles)


def png_of(image: np.ndarray) -> bytes:
    """Return an image (H, W, 3 or 1) uint8 as a PNG."""
    png = io.BytesIO()
    Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(png, "PNG")
    return png.getvalue()


def save_each(folder: Path, images: np.ndarray, labels: np.ndarray | None, titles: Sequence[str]) -> None:
    """Write images (N, H, W, 3 or 1) uint8 as ``NUMBER_LABEL.png``: 000012_7.png is image 12, of class 7.

    Without labels as ``NUMBER.png``, with what it shows in ``NUMBER.txt``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number, (image, title) in enumerate(zip(images, titles)):
        name = f"{number:06d}" if labels is None else f"{number:06d}_{labels[number]}"
        (folder / f"{name}.png").write_bytes(png_of(image))
        if labels is None:
            (folder / f"{name}.txt").write_text(title + "\n", encoding="utf-8")
