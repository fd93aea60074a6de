"""Transparent images as a viewer shows them: the opacity of each pixel, and what lies behind the image."""

from __future__ import annotations

import numpy as np
from PIL import Image

BACKGROUND = "white"
"""What transparent pixels of an image or a video show."""

_LARGEST_LEVEL = {"1": 1, "L;2": 3, "L;4": 15}
"""The level of white in a PNG with fewer than 8 bits a pixel, by Pillow's name of the layout."""


def scale_transparent_color(image: Image.Image) -> None:
    """Bring the one transparent colour of a PNG just opened to the 8 bits a channel in which Pillow decodes it.

    Pillow leaves the levels of the file, which no decoded pixel has. Grey of 16 bits keeps its levels.
    """
    color, tiles = image.info.get("transparency"), getattr(image, "tile", None)
    if image.format != "PNG" or not tiles or not isinstance(color, (int, tuple)):
        return
    layout = tiles[0][3]
    if isinstance(color, tuple) and layout == "RGB;16B":
        image.info["transparency"] = tuple(level >> 8 for level in color)
    elif isinstance(color, int) and layout in _LARGEST_LEVEL:
        image.info["transparency"] = color * 255 // _LARGEST_LEVEL[layout]


def opacity_of(image: Image.Image) -> Image.Image | None:
    """Return the opacity of each pixel of an image with 8 bits a channel, in mode L; None if it has no transparency."""
    return image.convert("RGBA").getchannel("A") if image.has_transparency_data else None


def flatten(pixels: Image.Image, opacity: Image.Image | None) -> Image.Image:
    """Return ``pixels``, in mode L or RGB, over the background."""
    if opacity is None:
        return pixels
    return Image.composite(pixels, Image.new(pixels.mode, pixels.size, BACKGROUND), opacity)


def flattened_frame(pixels: np.ndarray) -> np.ndarray:
    """Return a frame (h, w, 3 or 4) uint8, RGB or RGBA, as (h, w, 3) over the background."""
    if pixels.shape[2] == 3:
        return pixels
    return np.asarray(flatten(Image.fromarray(pixels[..., :3]), Image.fromarray(pixels[..., 3])))
