"""From an image file to pixels of one size: opened safely, upright, 8 bits a channel, opaque, in sRGB, cut to size.

What a file states about its colours, and the conversion that its profile specifies, are at the end."""

from __future__ import annotations

import importlib
import io
import re
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import ExifTags, Image, ImageCms, ImageOps, UnidentifiedImageError
from PIL.PngImagePlugin import PngStream

from mindspeed_mm_dit.configs.files import UnusableFile, check_file, error_text
from mindspeed_mm_dit.configs.source import ColorProfiles, Size

_MODES = {1: "L", 3: "RGB"}

SUFFIXES = (
    *(".png", ".apng", ".jpg", ".jpeg", ".jpe", ".jfif", ".bmp", ".dib", ".webp", ".gif", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".j2k", ".avif", ".heic", ".heif"),
)
"""Endings of images. Some of Pillow's other formats start a program (EPS), some accept any bytes (TGA)."""

READER_OF = dict.fromkeys((".heic", ".heif"), "'pillow-heif>=1.1'")
"""What to install for images of an ending that Pillow alone does not read."""

_MOVING = ("PNG", "WEBP", "AVIF")
"""Pillow's image formats that may be animated."""

MAX_SCALED_PIXELS = 1 << 27
"""Images so narrow that they would have more pixels than this after scaling their shorter side to fit are refused."""

BACKGROUND = "white"
"""What transparent pixels of an image or a video show."""

_LARGEST_LEVEL = {"1": 1, "L;2": 3, "L;4": 15}
"""The level of white in a PNG with fewer than 8 bits a pixel, by Pillow's name of the layout."""

# Pillow warns of damaged EXIF data, transparency, and images of half the size it refuses: users cannot act on these.
warnings.filterwarnings("ignore", module=r"PIL\.")


@lru_cache(maxsize=1)
def readable_formats() -> dict[str, str]:
    """Return Pillow's format name for each of SUFFIXES that it can read here (AVIF and HEIF are optional)."""
    Image.preinit()  # PNG, JPEG, BMP, GIF and PPM; importing Pillow's forty other formats too would take a while
    for name in ("WebP", "Tiff", "Jpeg2K", "Avif"):
        with suppress(ImportError):
            importlib.import_module(f"PIL.{name}ImagePlugin")
    with suppress(ImportError):
        heif = importlib.import_module("pillow_heif")
        major, minor = re.findall(r"\d+", heif.__version__)[:2]
        if (int(major), int(minor)) >= (1, 1):  # (1.0 rotates a photograph twice)
            heif.register_heif_opener()
    known = Image.EXTENSION
    return {suffix: known[suffix] for suffix in SUFFIXES if known.get(suffix) in Image.OPEN}


@contextmanager
def open_image(path: str | Path | bytes, size: int | Size) -> Iterator[Image.Image]:
    """Open an image, from a file or its content, that will be cut to ``size``, (H, W) or the side of a square.

    Its pixels are not decoded yet.

    Raises:
        UnusableFile: for anything wrong with it, here or inside the ``with`` block.
    """
    if (len(path) if isinstance(path, bytes) else check_file(path)) == 0:
        raise UnusableFile("is empty")
    source = io.BytesIO(path) if isinstance(path, bytes) else path
    try:
        with Image.open(source, formats=list(dict.fromkeys(readable_formats().values()))) as image:
            _check_form(image, *height_and_width(size))
            find_profile(image)
            _read_late_chunks(image)
            _scale_transparent_color(image)
            yield image
    except UnusableFile:
        raise
    except UnidentifiedImageError:
        raise UnusableFile("cannot be decoded: it is not an image, or of a format that cannot be read here") from None
    except Image.DecompressionBombError as error:
        raise UnusableFile(f"cannot be decoded: {error} Scale it down") from None
    except PermissionError as error:
        raise UnusableFile(f"cannot be read: {error_text(error)}") from None
    except Exception as error:  # a decoder can raise anything on damaged bytes
        raise UnusableFile(f"cannot be decoded: {error_text(error)}") from error


def height_and_width(size: int | Size) -> Size:
    """Return (H, W) of a size that may be the side of a square."""
    return (size, size) if isinstance(size, int) else size


def _check_form(image: Image.Image, height: int, width: int) -> None:
    """Raise UnusableFile for an image whose pixel values are ambiguous, or that would not fit into memory."""
    shorter, longer = sorted(image.size)
    if max(height, width) ** 2 * longer >= MAX_SCALED_PIXELS * shorter:
        size = f"image_size {height}" if height == width else f"a shape of {height} x {width}"
        raise UnusableFile(f"is too narrow for {size}: {image.width} x {image.height} pixels")
    if image.mode == "F" or (image.mode == "I" and not _has_16_bits(image)):
        raise UnusableFile("has 32 bits a pixel, which do not define where white is: save it with 8 or 16")


def load_pixels(
    path: str | bytes, size: int | Size, channels: int, color_profiles: ColorProfiles = "convert"
) -> np.ndarray:
    """Read an image file, or its content, as pixels, (channels, H, W) uint8; channels is 1 (grey) or 3 (RGB).

    size: (H, W), or the side of a square. The EXIF orientation is applied, and an embedded colour profile unless
    ``color_profiles`` is "ignore"; 16-bit grey is scaled to 8 bits, and transparent pixels show a white background.
    Raises UnusableFile.
    """
    with open_image(path, size) as image:
        pixels = np.asarray(center_crop(_plain(image, channels, color_profiles), size))
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def load_still(path: str | Path, size: int, color_profiles: ColorProfiles = "convert") -> np.ndarray:
    """Read an image file at its own size, (h, w, 3) uint8 RGB, to be scaled to ``size``; else like ``load_pixels``.

    Raises UnusableFile.
    """
    with open_image(path, size) as image:
        if image.format in _MOVING and getattr(image, "is_animated", False):
            raise UnusableFile(
                f"is an animated {image.format}, of which only one frame could be read: save it as .mp4 or .gif"
            )
        return np.asarray(_plain(image, 3, color_profiles))


def still_size(path: str | Path, size: int) -> Size:
    """Return (H, W) of an image file from its header, upright; ``size``: as in ``load_still``. Raises UnusableFile."""
    with open_image(path, size) as image:
        return upright_size(image)


def center_crop(image: Image.Image, size: int | Size) -> Image.Image:
    """Scale to cover ``size``, (H, W) or the side of a square, and cut the centre, as ADM and DiT prepare ImageNet.

    The image is halved with a box filter while it is at least twice the target, then scaled bicubically.
    """
    height, width = height_and_width(size)
    if image.size == (width, height):
        return image
    while image.width >= 2 * width and image.height >= 2 * height:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = max(width / image.width, height / image.height)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


def _plain(image: Image.Image, channels: int, color_profiles: ColorProfiles) -> Image.Image:
    """Return an image upright, with 8 bits a channel, in grey (1 channel) or RGB (3)."""
    image = to_8_bits(image)
    with suppress(Exception):  # damaged EXIF data can raise anything, but the image may be intact
        image = ImageOps.exif_transpose(image) if image.getexif().get(ExifTags.Base.Orientation, 1) != 1 else image
    opacity = opacity_of(image)
    return flatten(
        (convert_to_srgb(image) if color_profiles == "convert" else image).convert(_MODES[channels]), opacity
    )


# --- 16 bits a channel ------------------------------------------------------------------------------------------------


def _has_16_bits(image: Image.Image) -> bool:
    return image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))


def to_8_bits(image: Image.Image) -> Image.Image:
    """Scale 16-bit grey to 8 bits; Pillow's own conversion would clip it to white."""
    if not _has_16_bits(image):
        return image
    levels = np.asarray(image).astype(np.uint32)
    scaled = Image.fromarray(((levels + 128) // 257).astype(np.uint8))
    scaled.info = image.info.copy()  # with the EXIF data and the profile
    if (transparent := scaled.info.pop("transparency", None)) is not None:
        scaled.putalpha(Image.fromarray(np.where(levels == transparent, 0, 255).astype(np.uint8)))
    return scaled


# --- orientation ------------------------------------------------------------------------------------------------------


def upright_size(image: Image.Image) -> Size:
    """Return (H, W) of an image after its EXIF orientation; decodes nothing."""
    width, height = image.size
    is_rotated = False
    with suppress(Exception):  # damaged EXIF data can raise anything, but the image may be intact
        # Image.getexif, as the method of PNG images would decode the pixels.
        is_rotated = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1) in (5, 6, 7, 8)
        if is_rotated and image.format == "TIFF":  # (some versions of Pillow swap its size)
            width, height = (image.tag_v2[tag] for tag in (ExifTags.Base.ImageWidth, ExifTags.Base.ImageLength))  # type: ignore[attr-defined]
    return (width, height) if is_rotated else (height, width)


def _read_late_chunks(image: Image.Image) -> None:
    """Read EXIF and XMP from behind the pixels of a PNG, where Pillow looks only once it has decoded them."""
    if image.format != "PNG" or image.fp is None or "exif" in image.info:
        return
    position = image.fp.tell()
    with suppress(Exception):  # (the end of a damaged file)
        image.fp.seek(8)
        stream, kind = PngStream(image.fp), b""
        while kind != b"IEND":
            kind, start, length = stream.read()
            if kind in (b"eXIf", b"iTXt", b"zTXt", b"tEXt"):
                stream.call(kind, start, length)
                image.info |= {key: value for key, value in stream.im_info.items() if key not in image.info}
            image.fp.seek(start + length + 4)
    image.fp.seek(position)


# --- transparency -----------------------------------------------------------------------------------------------------


def _scale_transparent_color(image: Image.Image) -> None:
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


# --- colours ----------------------------------------------------------------------------------------------------------

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

_MODES_OF_PROFILES = {"RGB": "RGB", "GRAY": "L", "CMYK": "CMYK"}
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
    space = _MODES_OF_PROFILES.get(source.profile.xcolor_space.strip(), "")
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
