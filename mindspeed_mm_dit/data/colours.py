"""Brings an image to sRGB: what its file states about its colours, and the conversion that a profile specifies."""

from __future__ import annotations

import io
import struct
from enum import Enum
from functools import lru_cache
from typing import Any

import numpy as np
from PIL import ExifTags, Image, ImageCms

INTENT = ImageCms.Intent.PERCEPTUAL
"""Rendering intent of conversions; it only matters for profiles with tables, as CMYK's are."""

SAME = 2
"""A profile that moves no colour by more than this, in levels of 255, is sRGB written differently: pixels stay."""

SRGB_CHROMATICITY = (0.3127, 0.329, 0.64, 0.33, 0.3, 0.6, 0.15, 0.06)
"""x and y of sRGB's white, red, green and blue."""

HEADER, MAX_PROFILE_BYTES = 1 << 16, 1 << 22
"""How many bytes of a file are searched for colour codes, and for a profile, which Pillow does not report."""

_NCLX = (b"colrnclx", ">HH")
_CODES = {"PNG": (b"cICP", ">BB"), "AVIF": _NCLX, "HEIF": _NCLX}
"""What precedes codes of colours in a file of each format, and how they are written."""

_MODES = {"RGB": "RGB", "GRAY": "L", "CMYK": "CMYK"}
"""Mode of the pixels that a profile describes, by the profile's name of the colour space."""


class Colours(Enum):
    """What the file of an image states about its colours. The value follows "N of M images ..."."""

    SRGB = ""
    """sRGB, or nothing."""
    PROFILE = "have a colour profile other than sRGB's"
    BROKEN = "have a colour profile that cannot be used, and are learned as they stand"
    UNCLEAR = "are not in sRGB (by EXIF, gAMA, cHRM, cICP or CMYK) but have no profile, and are learned as they stand"


def is_grey(mode: str) -> bool:
    """Return whether one of Pillow's modes has no colour."""
    return mode.startswith(("1", "L", "I")) and mode != "LAB"


def find_profile(image: Image.Image) -> None:
    """Read the profile of a JPEG 2000 just opened into ``image.info``, where Pillow puts those of other formats."""
    if image.format == "JPEG2000":
        before, _, box = _beginning(image.fp, MAX_PROFILE_BYTES).partition(b"colr")
        if box[:1] in (b"\2", b"\3"):  # (the methods with a profile, which follows after 2 bytes)
            image.info["icc_profile"] = box[3 : int.from_bytes(before[-4:], "big") - 8]


def convert_to_srgb(image: Image.Image) -> Image.Image:
    """Convert an image of 8 bits a channel to sRGB by its embedded profile; return it unchanged if it needs none."""
    try:
        transform = _transform_of(image)
    except ImageCms.PyCMSError:
        return image
    return transform.apply(image.convert(transform.input_mode)) if transform else image


def colours_of(image: Image.Image) -> Colours:
    """Return what the header of an image states about its colours; nothing is decoded."""
    try:
        if _transform_of(image) is not None:
            return Colours.PROFILE
    except ImageCms.PyCMSError:
        return Colours.BROKEN
    return Colours.UNCLEAR if "icc_profile" not in image.info and _is_not_srgb(image) else Colours.SRGB


def _transform_of(image: Image.Image) -> Any:
    """Return the transform of an image to sRGB; None if none is needed. Raises PyCMSError for an unusable profile."""
    if "icc_profile" not in image.info or image.mode == "LAB":  # (Lab needs no profile: Pillow converts it)
        return None
    mode = "L" if is_grey(image.mode) else "CMYK" if image.mode == "CMYK" else "RGB"
    return _transform(image.info["icc_profile"] or b"", mode)  # (None if Pillow could not read it)


@lru_cache(maxsize=64)
def _transform(profile: bytes, mode: str) -> Any:
    """Return the transform of pixels of ``mode`` to sRGB; None if it moves no colour. Raises PyCMSError.

    It may be used by several threads (NOCACHE). ImageCms.profileToProfile would build it again for each image.
    """
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
    except (OSError, TypeError) as error:
        raise ImageCms.PyCMSError(error) from error
    space = _MODES.get(source.profile.xcolor_space.strip(), "")
    # Programs that convert photographs to grey often leave their RGB profile.
    if space != mode and (space, mode) != ("RGB", "L"):
        raise ImageCms.PyCMSError(f"a profile of {space} for pixels of {mode}")
    srgb = ImageCms.createProfile("sRGB")
    transform = ImageCms.buildTransform(source, srgb, space, "RGB", INTENT, ImageCms.Flags.NOCACHE)
    return transform if space == "CMYK" or _changes_colours(transform) else None


def _changes_colours(transform: Any) -> bool:
    """Return whether a transform of grey or RGB changes a colour visibly, of 4,096 spread over all."""
    levels = np.arange(0, 256, 17, np.uint8)
    spread = np.stack(np.meshgrid(levels, levels, levels), -1).reshape(64, 64, 3)
    before = Image.fromarray(spread).convert(transform.input_mode)
    after = np.asarray(transform.apply(before), np.int16)
    return bool((np.abs(after - np.asarray(before.convert("RGB"))) > SAME).any())


def _is_not_srgb(image: Image.Image) -> bool:
    """Return whether an image without a profile states by other means that it is not in sRGB."""
    if image.mode == "CMYK":
        return True
    if (codes := _code_points(image)) is not None:
        return codes[0] not in (1, 2) or codes[1] not in (1, 2, 6, 13)  # (BT.709 or sRGB; 2 is unspecified)
    if "srgb" in image.info:
        return False
    if "gamma" in image.info or "chromaticity" in image.info:
        gamma = image.info.get("gamma", 1 / 2.2)
        white_and_primaries = image.info.get("chromaticity", SRGB_CHROMATICITY)
        is_srgb = np.allclose(gamma, 1 / 2.2, atol=0.02)
        return not (is_srgb and np.allclose(white_and_primaries, SRGB_CHROMATICITY, atol=0.01))
    try:
        exif = Image.Image.getexif(image)  # (the method of PNG images would decode the pixels)
        tags = exif.get_ifd(ExifTags.IFD.Exif)
        names = exif.get_ifd(ExifTags.IFD.Interop) if ExifTags.IFD.Interop in tags else {}
        return tags.get(ExifTags.Base.ColorSpace, 1) != 1 or names.get(ExifTags.Interop.InteropIndex) == "R03"
    except Exception:  # damaged EXIF data can raise anything
        return False


def _code_points(image: Image.Image) -> tuple[int, int] | None:
    """Return primaries and transfer function by ITU-T H.273, as a PNG (cICP), AVIF or HEIF (nclx) may have them."""
    mark, codes = _CODES.get(image.format or "", (b"", ""))
    if not mark or image.fp is None:
        return None
    _, separator, rest = _beginning(image.fp, HEADER).partition(b"IDAT")[0].partition(mark)
    return struct.unpack_from(codes, rest) if len(rest) >= struct.calcsize(codes) and separator else None  # type: ignore[return-value]


def _beginning(file: Any, num_bytes: int) -> bytes:
    """Return the first bytes of an open file, and leave it where it was."""
    position = file.tell()
    file.seek(0)
    content = file.read(num_bytes)
    file.seek(position)
    return content
