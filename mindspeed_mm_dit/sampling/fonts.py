"""A font that has the letters of a name, whatever its script: Pillow's own, matplotlib's, or one of this system."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

from PIL import ImageFont

POINTS = 13
_OF_BOXES = ("lastresort", "adobeblank", "adobenotdef")
"""Fonts that have every letter, and draw a box for it."""


def font_for(text: str, instead: str = "a number stands") -> Any:
    """Return a font that has every letter of ``text``; None where none here has, which is said once.

    instead: what is drawn then, with its verb.
    """
    if text.isascii():
        return ImageFont.load_default(size=POINTS + 1)
    for path in _fonts():
        if _letters_of(path).issuperset(map(ord, text)):
            return ImageFont.truetype(path, POINTS)
    _say_missing(text, instead)
    return None


@cache
def _fonts() -> tuple[str, ...]:
    """Return the font files to look into: matplotlib's, then upright ones of the system, then the rest."""
    import matplotlib

    found = (path for path in _system_fonts() if not any(name in path.lower() for name in _OF_BOXES))
    own = f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSans.ttf"
    return (own, *sorted(found, key=lambda path: ("Regular" not in path, "Sans" not in path, path)))


def _system_fonts() -> list[str]:
    from matplotlib.font_manager import findSystemFonts

    return findSystemFonts()


@cache
def _letters_of(path: str) -> frozenset[int]:
    """Return the letters that a font file has; none of one that cannot be read."""
    from matplotlib.ft2font import FT2Font

    try:
        ImageFont.truetype(path, POINTS)
        return frozenset(FT2Font(path).get_charmap())
    except (OSError, RuntimeError):  # of bitmaps alone, damaged, gone
        return frozenset()


@cache
def _say_missing(text: str, instead: str) -> None:
    print(
        f"note: no font here has the letters of {text}, so {instead} in the picture: install one that has, such "
        "as Debian's package fonts-noto-cjk, or put its file into ~/.local/share/fonts",
        file=sys.stderr,
    )
