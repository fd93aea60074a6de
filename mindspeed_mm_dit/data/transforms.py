"""From an image file to pixels of one size."""

from __future__ import annotations

import struct
import zlib

import numpy as np
from PIL import ExifTags, Image, ImageOps

_MODES = {1: "L", 3: "RGB"}

UNREADABLE = (OSError, SyntaxError, ValueError, IndexError, struct.error, zlib.error, Image.DecompressionBombError)
"""What Pillow raises for a file that is no usable image."""


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
    """Read an image file as pixels, (channels, size, size) uint8; channels is 1 (grey) or 3 (RGB).

    The picture stands as its EXIF orientation says; grey of 16 bits is scaled to 8.
    Raises one of UNREADABLE.
    """
    with Image.open(path) as image:
        pixels = np.asarray(center_crop(_upright(_of_8_bits(image)).convert(_MODES[channels]), size))
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def _of_8_bits(image: Image.Image) -> Image.Image:
    """Scale grey of 16 bits to 8; Pillow's own conversion would clip it to white."""
    if not (image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))):
        return image
    scaled = Image.fromarray(((np.asarray(image).astype(np.uint32) + 128) // 257).astype(np.uint8))
    scaled.info = image.info  # with the EXIF data
    return scaled


def _upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image) if image.getexif().get(ExifTags.Base.Orientation, 1) != 1 else image
    except UNREADABLE:  # damaged EXIF data of a picture that may be whole
        return image
