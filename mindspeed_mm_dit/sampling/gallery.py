"""Samples as one HTML page that needs no other file: each with its label, the seed and its number below it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from mindspeed_mm_dit.pages import embed, table, write_page

MOST_PICTURES = 2000
"""On one page; of 256 x 256 pixels they are some 300 MB."""
SIDE_PIXELS = 96
"""Smaller pictures are shown enlarged to at least this."""
_STYLE = "<style>figure { text-align: center } img { image-rendering: pixelated }</style>"


def write_gallery(
    path: Path, pngs: Sequence[bytes], side: int, classes: Sequence[str], seed: int, settings: Mapping[str, str]
) -> None:
    """Write pictures, PNGs of ``side`` pixels, in the order in which they were drawn.

    classes: what each picture shows, in words. settings: what else decides the pictures, by name.
    """
    width = side * max(1, -(-SIDE_PIXELS // side))
    figures = [
        f"<figure>{embed(png, shown, width)}"
        f"<figcaption>{escape(shown)}<br>seed {seed}, image {number}</figcaption></figure>"
        for number, (png, shown) in enumerate(zip(pngs, classes))
    ]
    write_page(path, "Samples", [_STYLE, "<h1>Samples</h1>", table(("", ""), list(settings.items())), *figures])
