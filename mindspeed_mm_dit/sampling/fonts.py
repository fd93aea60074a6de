"""Find a font that has the letters of a name, in any script: Pillow's, matplotlib's, or one of this system."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from typing import Any

from PIL import ImageFont

from mindspeed_mm_dit.terminal import echo_if_open

POINTS = 13
_OF_BOXES = ("lastresort", "adobeblank", "adobenotdef")
"""Fonts that have every letter, but draw a box for each."""


def drawable(text: str) -> tuple[str, Any]:
    """Return ``text`` and a font that has its letters, or if there is none, the font that has the most of them.

    Question marks replace the letters that it lacks, and a note is printed once.
    """
    if text.isascii():
        return _plain(text)
    wanted = frozenset(map(ord, text))
    whole = (path for path in _fonts() if wanted <= _letters_of(path))
    path = next(whole, None) or max(_fonts(), key=lambda path: len(wanted & _letters_of(path)), default=None)
    letters = _letters_of(path) if path else frozenset(range(128))
    found = "".join(letter if ord(letter) in letters else "?" for letter in text)
    if found != text:
        _say_missing(text)
    return (found, ImageFont.truetype(path, POINTS)) if path and not found.isascii() else _plain(found)


def _plain(text: str) -> tuple[str, Any]:
    """Return ``text``, which has plain letters only, and Pillow's own font."""
    return text, ImageFont.load_default(size=POINTS + 1)


@cache
def _fonts() -> tuple[str, ...]:
    """Return the font files to search: matplotlib's, then upright ones of the system, then the rest.

    Without matplotlib, which finds and reads them, there are none.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return ()
    import matplotlib

    found = (path for path in _system_fonts() if not any(name in path.lower() for name in _OF_BOXES))
    own = f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSans.ttf"
    return (own, *sorted(found, key=lambda path: ("Regular" not in path, "Sans" not in path, path)))


def _system_fonts() -> list[str]:
    from matplotlib.font_manager import findSystemFonts

    return findSystemFonts()


@cache
def _letters_of(path: str) -> frozenset[int]:
    """Return the letters in a font file; none if it cannot be read."""
    from matplotlib.ft2font import FT2Font

    try:
        ImageFont.truetype(path, POINTS)
        return frozenset(FT2Font(path).get_charmap())
    except (OSError, RuntimeError):  # only bitmaps, damaged, or gone
        return frozenset()


@cache
def _say_missing(text: str) -> None:
    cure = "install one that has, e.g. Debian's package fonts-noto-cjk, or put its file into ~/.local/share/fonts"
    cure = cure if _fonts() else "pip install matplotlib, which brings fonts and finds those of this system"
    echo_if_open(
        f"note: no font here has all letters of {text}, so a number or question marks stand in the picture: {cure}",
        file=sys.stderr,
    )
