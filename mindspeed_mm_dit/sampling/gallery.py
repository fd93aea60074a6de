"""Samples as one HTML page that needs no other file: each with its label, the seed and its number below it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mindspeed_mm_dit.pages import write

MOST_PICTURES = 2000
"""On one page; of 256 x 256 pixels they are some 300 MB."""
SIDE_PIXELS = 96
"""Smaller pictures are shown enlarged to at least this."""


def write_gallery(
    path: Path,
    pngs: Sequence[bytes],
    size: Sequence[int],
    classes: Sequence[str],
    seed: int,
    settings: Mapping[str, str],
) -> None:
    """Write pictures, PNGs of ``size`` (H, W) that were drawn in this order, those of a class together.

    classes: what each picture shows, in words. settings: what else decides the pictures, by name.
    """
    groups: dict[str, list[tuple[int, bytes]]] = {}
    for number, (png, shown) in enumerate(zip(pngs, classes)):
        groups.setdefault(shown, []).append((number, png))
    width = size[1] * max(1, -(-SIDE_PIXELS // min(size)))
    write(path, "gallery.html", title="Samples", groups=groups, width=width, seed=seed, settings=settings)
