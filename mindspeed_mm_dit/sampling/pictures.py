"""A picture of samples: one row per class or caption, with its name in front, in a font that has its letters."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from mindspeed_mm_dit.configs.source import Size
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.terminal import logger

POINTS = 13
_PLACEHOLDER_FONTS = ("lastresort", "adobeblank", "adobenotdef")
"""Fonts that cover every letter, but draw only a box for each."""


def font_for(text: str) -> tuple[str, Any]:
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
    how = "install such a font, e.g. Debian's package fonts-noto-cjk, or put its file into ~/.local/share/fonts"
    how = how if _fonts() else "pip install matplotlib, which includes fonts and finds those of this system"
    logger.warning(
        f"note: no installed font has all letters of {text}; the picture shows a number or question marks instead. "
        f"To change that, {how}"
    )


CELL_PIXELS = 48
"""Smaller images are enlarged, pixel by pixel, to at least this."""
GAP_PIXELS = 2
BORDER_PIXELS, CAPTION_PIXELS = 8, 22
LINE = 20
"""Samples of a title side by side; more continue on the line below."""
TITLE_LETTERS = 40
"""Longer titles are cut."""

PICTURES = (".png", ".jpg", ".jpeg")
ENDINGS = (".npz", *PICTURES)
"""Endings of the files that images are written to, in upper or lower case."""
_JPEG_PIXELS = 65_500


def to_pil_image(pixels: np.ndarray) -> Image.Image:
    """Return pixels (H, W, 3 or 1) uint8 as an image."""
    return Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)


def draw_grid(
    images: np.ndarray | Sequence[np.ndarray],
    titles: Sequence[str],
    per_title: int | None = None,
    least: int = CELL_PIXELS,
) -> Image.Image:
    """Lay out images (H, W, 3 or 1) uint8 by title, at most ``per_title`` of each, of at least ``least`` pixels.

    Rows are in the order in which titles first appear, in columns if each has one line. A title that cannot be drawn is
    replaced by its number.
    """
    cells = [_cell(image.shape[0], image.shape[1], least) for image in images]
    size = max(high for high, _ in cells), max(wide for _, wide in cells)
    numbers, texts = _title_numbers(titles), _texts(list(dict.fromkeys(titles)))
    layout = _Layout.from_titles(numbers, texts, size, per_title)
    grid = Image.new("RGB", (layout.width * layout.columns, layout.height), "white")
    pen, line = ImageDraw.Draw(grid), 0
    for number, (text, font) in enumerate(texts):
        column, row = divmod(line, layout.lines)
        left, top = column * layout.width, row * layout.step
        pen.text((left + 4, top + size[0] // 2), text, fill="black", font=font, anchor="lm")
        indices = np.flatnonzero(numbers == number)[:per_title]
        for position, index in enumerate(indices.tolist()):
            high, wide = cells[index]
            picture = to_pil_image(images[index]).resize((wide, high), Image.Resampling.NEAREST)
            x = left + layout.margin + position % LINE * (size[1] + GAP_PIXELS)
            grid.paste(picture, (x, top + position // LINE * layout.step))
        line += -(-len(indices) // LINE)
    return grid


class _Layout(NamedTuple):
    """Sizes of a grid in pixels, and its columns of titles."""

    margin: int
    """Width of the titles."""
    width: int
    """Width of a column of titles with their images."""
    step: int
    """Height of a line."""
    lines: int
    """Lines of a column."""
    columns: int

    @property
    def height(self) -> int:
        """Height of the grid."""
        return self.lines * self.step

    @classmethod
    def from_titles(
        cls, numbers: np.ndarray, texts: Sequence[tuple[str, Any]], size: Size, per_title: int | None
    ) -> _Layout:
        """Lay out images of ``size`` with the titles ``numbers``: in columns if each title fits on one line."""
        counts = np.minimum(np.bincount(numbers), per_title or len(numbers))
        margin = 12 + math.ceil(max(font.getlength(text) for text, font in texts))
        width, step = margin + min(LINE, int(counts.max())) * (size[1] + GAP_PIXELS), size[0] + GAP_PIXELS
        total = int((-(-counts // LINE)).sum())
        columns = max(1, round(math.sqrt(total * step / width))) if total == len(counts) else 1
        return cls(margin, width, step, -(-total // columns), columns)


def captioned(picture: Image.Image, caption: str) -> Image.Image:
    """Return ``picture`` with a border and a ``caption`` above it."""
    text, font = font_for(caption)
    width = max(picture.width, math.ceil(font.getlength(text))) + 2 * BORDER_PIXELS
    whole = Image.new("RGB", (width, picture.height + CAPTION_PIXELS + 2 * BORDER_PIXELS), "white")
    ImageDraw.Draw(whole).text((BORDER_PIXELS + 4, BORDER_PIXELS), text, fill="black", font=font)
    whole.paste(picture, (BORDER_PIXELS, BORDER_PIXELS + CAPTION_PIXELS))
    return whole


def stacked(pictures: Sequence[Image.Image]) -> Image.Image:
    """Return ``pictures`` stacked vertically."""
    whole = Image.new(
        "RGB", (max(picture.width for picture in pictures), sum(picture.height for picture in pictures)), "white"
    )
    for number, picture in enumerate(pictures):
        whole.paste(picture, (0, sum(above.height for above in pictures[:number])))
    return whole


def _title_numbers(titles: Sequence[str]) -> np.ndarray:
    """Number the distinct titles in the order in which they first appear; return the number of each, (N,) int64."""
    numbers = {title: number for number, title in enumerate(dict.fromkeys(titles))}
    return np.array([numbers[title] for title in titles], np.int64)


def memory_bytes(path: Path, num_images: int, size: Sequence[int]) -> int:
    """Return the bytes of memory that images take until they are written to ``path``.

    In colour: as generated, concatenated and, unless they are saved as arrays, laid out in a picture.
    """
    high, wide = (0, 0) if path.suffix.lower() == ".npz" else (side + GAP_PIXELS for side in _cell(*size))
    return num_images * 3 * (2 * size[0] * size[1] + high * wide)


def check_size(flag: str, path: Path, titles: Sequence[str], size: Sequence[int]) -> None:
    """Raise ConfigError if the picture of images with ``titles`` would be too large for the format of ``path``."""
    height = _Layout.from_titles(_title_numbers(titles), _texts(list(dict.fromkeys(titles))), _cell(*size), None).height
    if path.suffix.lower() in (".jpg", ".jpeg") and height > _JPEG_PIXELS:
        raise ConfigError(
            f"{flag} = {path} would be {height} pixels high, and a JPEG has at most {_JPEG_PIXELS}. Use .png or .npz, "
            "or fewer classes."
        )


def _cell(height: int, width: int, least: int = CELL_PIXELS) -> tuple[int, int]:
    """Return height and width of an image in a picture."""
    times = max(1, -(-least // min(height, width)))
    return height * times, width * times


def _texts(titles: Sequence[str]) -> list[tuple[str, Any]]:
    """Return the text in front of each row, and a font that has its letters."""
    texts = []
    for number, title in enumerate(titles):
        title = title if len(title) <= TITLE_LETTERS else title[: TITLE_LETTERS - 3] + "..."
        text, font = font_for(title)
        texts.append((text, font) if text.strip("? ") or not title.strip("? ") else font_for(str(number)))
    return texts
