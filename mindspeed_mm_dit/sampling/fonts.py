"""Find a font that has the letters of a name, in any script: Pillow's, matplotlib's, or one of this system."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from typing import Any

from PIL import ImageFont

from mindspeed_mm_dit.terminal import echo_if_open

POINTS = 13
_PLACEHOLDER_FONTS = ("lastresort", "adobeblank", "adobenotdef")
"""Fonts that cover every letter, but draw only a box for each."""


def drawable(text: str) -> tuple[str, Any]:
    """Return ``text`` and a font that has all its letters, or else the font that has most of them.

    Question marks replace missing letters, and a note is printed once.
    """
    if text.isascii():
        return _plain(text)
    needed = frozenset(map(ord, text))
    whole = (path for path in _fonts() if needed <= _letters_of(path))
    path = next(whole, None) or max(_fonts(), key=lambda path: len(needed & _letters_of(path)), default=None)
    letters = _letters_of(path) if path else frozenset(range(128))
    shortened = "".join(letter if ord(letter) in letters else "?" for letter in text)
    if shortened != text:
        _log_missing(text)
    return (shortened, ImageFont.truetype(path, POINTS)) if path and not shortened.isascii() else _plain(shortened)


def _plain(text: str) -> tuple[str, Any]:
    """Return an ASCII ``text`` and Pillow's default font."""
    return text, ImageFont.load_default(size=POINTS + 1)


@cache
def _fonts() -> tuple[str, ...]:
    """Return the font files to search: matplotlib's, then upright ones of the system, then the rest.

    Empty without matplotlib, which finds and reads them.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return ()
    import matplotlib

    paths = (path for path in _system_fonts() if not any(name in path.lower() for name in _PLACEHOLDER_FONTS))
    default = f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSans.ttf"
    return (default, *sorted(paths, key=lambda path: ("Regular" not in path, "Sans" not in path, path)))


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
def _log_missing(text: str) -> None:
    cure = "install such a font, e.g. Debian's package fonts-noto-cjk, or put its file into ~/.local/share/fonts"
    cure = cure if _fonts() else "pip install matplotlib, which includes fonts and finds those of this system"
    echo_if_open(
        f"note: no installed font has all letters of {text}; the picture shows a number or question marks instead. "
        f"To change that, {cure}",
        file=sys.stderr,
    )
