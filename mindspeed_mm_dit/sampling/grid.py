"""A picture of samples: one row per class, its label or name in front."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.sampling.fonts import font_for

CELL_PIXELS = 48
"""Smaller images are enlarged, pixel by pixel, to at least this."""
GAP_PIXELS = 2
LINE = 20
"""Samples of a class side by side; more continue on a line below."""
NAME_LETTERS = 24
"""Longer names are cut."""

PICTURES = (".png", ".jpg", ".jpeg")
ENDINGS = (".npz", *PICTURES)
"""Of the files that ``save_samples`` writes, in small or capital letters."""
_JPEG_PIXELS = 65_500


def draw_grid(
    images: np.ndarray, labels: np.ndarray, per_class: int | None = None, names: Sequence[str] = ()
) -> Image.Image:
    """Lay out images (N, H, W, 3 or 1) uint8 by label (N,), at most ``per_class`` of each.

    The rows stand in the order in which their labels come first.

    names: of the classes, by label; where there is none, or it cannot be drawn, the number stands.
    """
    cell = _cell(images.shape[1])
    classes = list(dict.fromkeys(labels.tolist()))
    shown = {label: images[labels == label][:per_class] for label in classes}
    columns, step = min(LINE, max(map(len, shown.values()))), cell + GAP_PIXELS
    texts = _texts(classes, names)
    margin = 12 + math.ceil(max(font.getlength(text) for text, font in texts))
    grid = Image.new("RGB", (margin + columns * step, _lines(labels, per_class) * step), "white")
    pen, line = ImageDraw.Draw(grid), 0
    for label, (text, font) in zip(classes, texts):
        pen.text((4, line * step + cell // 2), text, fill="black", font=font, anchor="lm")
        for number, image in enumerate(shown[label]):
            picture = Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).resize(
                (cell, cell), Image.Resampling.NEAREST
            )
            grid.paste(picture, (margin + number % LINE * step, (line + number // LINE) * step))
        line += -(-len(shown[label]) // LINE)
    return grid


def save_samples(
    path: str | Path, images: np.ndarray, labels: np.ndarray, per_class: int | None = None, names: Sequence[str] = ()
) -> None:
    """Write samples as ``.npz`` (arr_0: uint8 N,H,W,C; arr_1: labels) or as the picture of ``draw_grid``."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix.lower() == ".npz":
        with open(path, "wb") as file:  # given a name, NumPy would add its own ending to .NPZ
            np.savez(file, images, labels)
    else:
        draw_grid(images, labels, per_class, names).save(path)


def memory_bytes(path: Path, num_images: int, image_size: int) -> int:
    """Return the bytes that images take until ``save_samples`` has written them to ``path``.

    In colour: as they were drawn, joined to one array and, unless they are kept as numbers, laid out in a picture.
    """
    cell = 0 if path.suffix.lower() == ".npz" else _cell(image_size) + GAP_PIXELS
    return num_images * 3 * (2 * image_size**2 + cell**2)


def check_size(flag: str, path: Path, labels: np.ndarray, image_size: int) -> None:
    """Raise ConfigError if the picture of ``labels`` (N,) would be too large for the format of ``path``."""
    height = _lines(labels, None) * (_cell(image_size) + GAP_PIXELS)
    if path.suffix.lower() in (".jpg", ".jpeg") and height > _JPEG_PIXELS:
        reason = f"the picture would be {height} pixels high; a JPEG has at most {_JPEG_PIXELS}"
        raise ConfigError(f"{flag} = {path}", reason, "use .png or .npz, or fewer classes")


def _cell(image_size: int) -> int:
    """Return the pixels of an image's side in a picture."""
    return image_size * max(1, -(-CELL_PIXELS // image_size))


def _lines(labels: np.ndarray, per_class: int | None) -> int:
    _, counts = np.unique(labels, return_counts=True)
    return int((-(-np.minimum(counts, per_class or counts) // LINE)).sum())


def _texts(classes: Sequence[int], names: Sequence[str]) -> list[tuple[str, Any]]:
    """Return what stands before each row, and a font that has its letters."""
    texts = []
    for label in classes:
        name = names[label] if label < len(names) else str(label)
        name = name if len(name) <= NAME_LETTERS else name[: NAME_LETTERS - 3] + "..."
        font = font_for(name)
        texts.append((name, font) if font else (str(label), font_for(str(label))))
    return texts
