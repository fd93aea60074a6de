"""Save samples as one picture of all, as one file each, or as an HTML page that needs no other file."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from mindspeed_mm_dit.pages import write
from mindspeed_mm_dit.sampling.grid import draw_grid, stacked, to_pil_image
from mindspeed_mm_dit.sampling.video_files import draw_strips


def draw_samples(samples: np.ndarray, titles: Sequence[str], per_title: int | None = None) -> Image.Image:
    """Lay out images (N, H, W, C) in rows by title, or videos (N, F, H, W, C) as strips of their frames; uint8."""
    return draw_grid(samples, titles, per_title) if samples.ndim == 4 else draw_strips(samples, titles)


def draw_sizes(parts: Sequence[np.ndarray], titles: Sequence[str], per_title: int | None = None) -> Image.Image:
    """Lay out samples with ``titles`` in one or several sizes; each of ``parts`` as for ``draw_samples``.

    Images with distinct titles are shown side by side in all sizes; others are stacked, size by size.
    """
    if all(samples.ndim == 4 for samples in parts) and len(set(titles)) == len(titles):
        return draw_grid([image for samples in parts for image in samples], [*titles] * len(parts))
    return stacked([draw_samples(samples, titles, per_title) for samples in parts])


def png_of(image: np.ndarray) -> bytes:
    """Return an image (H, W, 3 or 1) uint8 as a PNG."""
    png = io.BytesIO()
    to_pil_image(image).save(png, "PNG")
    return png.getvalue()


def save_each(folder: Path, images: np.ndarray, labels: np.ndarray | None, titles: Sequence[str]) -> None:
    """Write images (N, H, W, 3 or 1) uint8 as ``NUMBER_LABEL.png``: 000012_7.png is image 12, of class 7.

    Without labels, an image is ``NUMBER.png``, and its title is in ``NUMBER.txt``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number, (image, title) in enumerate(zip(images, titles)):
        name = f"{number:06d}" if labels is None else f"{number:06d}_{labels[number]}"
        (folder / f"{name}.png").write_bytes(png_of(image))
        if labels is None:
            (folder / f"{name}.txt").write_text(title + "\n", encoding="utf-8")


MOST_PICTURES = 2000
"""Most images on one page; at 256 x 256 pixels they take some 300 MB."""
SIDE_PIXELS = 96
"""Smaller images are shown enlarged to at least this."""


def write_gallery(
    path: Path,
    pngs: Sequence[bytes],
    size: Sequence[int],
    classes: Sequence[str],
    seed: int,
    settings: Mapping[str, str],
) -> None:
    """Write a page of images: PNGs of ``size`` (H, W), in the order in which they were generated, grouped by class.

    classes: a caption of each image. settings: other settings that determine the images, by name.
    """
    groups: dict[str, list[tuple[int, bytes]]] = {}
    for number, (png, caption) in enumerate(zip(pngs, classes)):
        groups.setdefault(caption, []).append((number, png))
    width = size[1] * max(1, -(-SIDE_PIXELS // min(size)))
    write(path, "gallery.html", title="Samples", groups=groups, width=width, seed=seed, settings=settings)
