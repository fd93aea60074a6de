"""From an image file to pixels of one size."""

from __future__ import annotations

import numpy as np
from PIL import Image

_MODES = {1: "L", 3: "RGB"}


def center_crop(image: Image.Image, size: int) -> Image.Image:
    """Scale the shorter side to ``size`` and cut the centre square, as ADM and DiT prepare ImageNet.

    The image is halved with a box filter while it is at least twice too large, then scaled bicubically.
    """
    if image.size == (size, size):
        return image
    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = size / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    left, top = (image.width - size) // 2, (image.height - size) // 2
    return image.crop((left, top, left + size, top + size))


def load_pixels(path: str, size: int, channels: int) -> np.ndarray:
    """Read an image file as pixels, (channels, size, size) uint8; channels is 1 (grey) or 3 (RGB)."""
    with Image.open(path) as image:
        pixels = np.asarray(center_crop(image.convert(_MODES[channels]), size))
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)
