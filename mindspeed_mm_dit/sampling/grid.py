"""A picture of samples: one row per class, its label in front."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

CELL_PIXELS = 48
"""Smaller images are enlarged, pixel by pixel, to at least this."""
GAP_PIXELS = 2


def draw_grid(images: np.ndarray, labels: np.ndarray, per_row: int = 10) -> Image.Image:
    """Lay out images (N, H, W, 3 or 1) uint8 by label (N,), at most ``per_row`` of each."""
    factor = max(1, -(-CELL_PIXELS // images.shape[1]))
    cell = images.shape[1] * factor
    classes = sorted(set(labels.tolist()))
    columns = min(per_row, max(int((labels == label).sum()) for label in classes))
    margin = 8 + 10 * len(str(classes[-1]))
    step = cell + GAP_PIXELS
    grid = Image.new("RGB", (margin + columns * step, len(classes) * step), "white")
    pen, font = ImageDraw.Draw(grid), ImageFont.load_default(size=14)
    for row, label in enumerate(classes):
        pen.text((4, row * step + cell // 2), str(label), fill="black", font=font, anchor="lm")
        for column, image in enumerate(images[labels == label][:columns]):
            picture = Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).resize(
                (cell, cell), Image.Resampling.NEAREST
            )
            grid.paste(picture, (margin + column * step, row * step))
    return grid


def save_samples(path: str | Path, images: np.ndarray, labels: np.ndarray) -> None:
    """Write samples as ``.npz`` (arr_0: uint8 N,H,W,C; arr_1: labels) or as a picture."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".npz":
        np.savez(path, images, labels)
    else:
        draw_grid(images, labels).save(path)
