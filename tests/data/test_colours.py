"""What an image says about its colours is what is learned, or is counted: against the arithmetic of the standards."""

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageCms, features

from mindspeed_mm_dit.configs.images import DatasetParam
from mindspeed_mm_dit.data.sources import source_of
from mindspeed_mm_dit.data.transforms import Colours, colours_of, load_pixels, load_still, readable_formats
from tests.colour_fixtures import SRGB, WIDE, in_srgb, of_grey, of_inks, of_rgb
from tests.data_fixtures import open_rows

COLOUR = (70, 190, 90)
LOSSY = ("jpg", "heic")
INKS = np.broadcast_to([[100, 0, 0], [0, 0, 0]], (2, 2, 2, 2, 3)).copy()  # black ink is black, and no ink white
INKS[1, 0, 0, 0] = [50, -30, -40]


def needs_heif():
    pytest.importorskip("pillow_heif")
    assert ".heic" in readable_formats()


def learned(path, **how):
    return load_pixels(str(path), 8, 3, **how)[:, 4, 4].astype(int).tolist()


@pytest.mark.parametrize(("ending", "mode"), [
    ("png", "RGB"), ("png", "RGBA"), ("png", "P"), ("tif", "RGB"), ("webp", "RGB"), ("jpg", "RGB"), ("heic", "RGB"),
])  # fmt: skip
def test_a_profile_is_followed_in_every_format(tmp_path, ending, mode):
    if ending == "heic":
        needs_heif()
    image = Image.new("RGB", (8, 8), COLOUR)
    image = image.quantize() if mode == "P" else image.convert(mode)
    options = {"lossless": True} if ending == "webp" else {"quality": 100, "subsampling": 0} if ending in LOSSY else {}
    image.save(tmp_path / f"a.{ending}", icc_profile=of_rgb(WIDE, 2.2), **options)
    found, right = learned(tmp_path / f"a.{ending}"), in_srgb(COLOUR, WIDE, 2.2)
    assert np.abs(np.array(found) - right).max() <= (3 if ending in LOSSY else 1)
    assert (load_still(tmp_path / f"a.{ending}", 8)[4, 4] == found).all()
    stored = learned(tmp_path / f"a.{ending}", color_profiles="ignore")
    assert np.abs(np.array(stored) - COLOUR).max() <= 2 and np.abs(np.array(found) - COLOUR).max() > 20


@pytest.mark.parametrize(("stored", "profile", "right"), [
    (100, of_grey(1.8), in_srgb((100, 100, 100), SRGB, 1.8)),
    (100, of_rgb(SRGB, 1.8), in_srgb((100, 100, 100), SRGB, 1.8)),  # left there by what made the photograph grey
    (np.uint16(100 * 257), of_grey(1.8), in_srgb((100, 100, 100), SRGB, 1.8)),
    ((255, 0, 0, 0), of_inks(INKS), (0, 132, 186)),  # Lab (50, -30, -40), by the formulas of CIE and IEC
    ((0, 0, 0, 255), of_inks(INKS), (0, 0, 0)),
])  # fmt: skip
def test_grey_and_inks_have_profiles_of_their_own(tmp_path, stored, profile, right):
    image = Image.fromarray(np.full((8, 8, *np.shape(stored)), stored, getattr(stored, "dtype", np.uint8)))
    image = Image.new("CMYK", (8, 8), stored) if np.size(stored) == 4 else image
    image.save(tmp_path / "a.tif", icc_profile=profile)
    assert np.abs(np.array(learned(tmp_path / "a.tif")) - right).max() <= 2
    assert load_pixels(str(tmp_path / "a.tif"), 8, 1).shape == (1, 8, 8)


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png_with(name: bytes, content: bytes) -> bytes:
    """A PNG of 8 x 8 with one more chunk."""
    rows = b"".join(b"\0" + bytes(COLOUR) * 8 for _ in range(8))
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0))
    chunks = (header, chunk(name, content), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def exif(space, interoperability=None):
    found = Image.Exif()
    own = {ExifTags.Base.ColorSpace: space}
    if interoperability:
        own[ExifTags.IFD.Interop] = {ExifTags.Interop.InteropIndex: interoperability}
    found[ExifTags.IFD.Exif] = own
    return found


CHROMATICITY = struct.pack(">8I", 31270, 32900, 64000, 33000, 30000, 60000, 15000, 6000)


@pytest.mark.parametrize(("content", "expected"), [
    (png_with(b"tEXt", b"a\0b"), Colours.SRGB),
    (png_with(b"gAMA", struct.pack(">I", 100000)), Colours.UNCLEAR),
    (png_with(b"cHRM", CHROMATICITY), Colours.SRGB),
    (png_with(b"cHRM", CHROMATICITY[:-8] + struct.pack(">II", 15000, 16000)), Colours.UNCLEAR),
    (png_with(b"cICP", bytes([1, 13, 0, 1])), Colours.SRGB),
    (png_with(b"cICP", bytes([9, 16, 0, 1])), Colours.UNCLEAR),
    (png_with(b"iCCP", b"a\0\0" + zlib.compress(b"no profile" * 20)), Colours.BROKEN),
    (png_with(b"iCCP", b"a\0\0" + zlib.compress(of_grey(1.8))), Colours.BROKEN),  # of grey, for pixels in colour
    (png_with(b"iCCP", b"a\0\0" + zlib.compress(of_rgb(WIDE, 2.2))), Colours.PROFILE),
])  # fmt: skip
def test_what_a_png_says_is_followed_or_named(tmp_path, content, expected):
    (tmp_path / "a.png").write_bytes(content)
    with Image.open(tmp_path / "a.png") as image:
        assert colours_of(image) is expected
    assert (learned(tmp_path / "a.png") == list(COLOUR)) is (expected is not Colours.PROFILE)


@pytest.mark.parametrize("ending", ["heic", "avif"])
def test_wide_colours_of_heif_and_avif_are_unclear(tmp_path, ending):
    if ending == "heic":
        needs_heif()
    elif not features.check("avif"):
        pytest.skip("Pillow was built without AVIF")
    file = tmp_path / f"a.{ending}"
    Image.new("RGB", (8, 8), COLOUR).save(file)
    content = file.read_bytes()
    for primaries, expected in ((1, Colours.SRGB), (12, Colours.UNCLEAR)):  # 12 is Display P3
        file.write_bytes(content.replace(b"colrnclx\0\1", b"colrnclx\0" + bytes([primaries])))
        with Image.open(file) as image:
            assert colours_of(image) is expected


@pytest.mark.parametrize(("mode", "options", "expected"), [
    ("RGB", {"icc_profile": ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()}, Colours.SRGB),
    ("RGB", {"exif": exif(1, "R98")}, Colours.SRGB),
    ("RGB", {"exif": exif(65535)}, Colours.UNCLEAR),
    ("RGB", {"exif": exif(2)}, Colours.UNCLEAR),
    ("RGB", {"exif": exif(1, "R03")}, Colours.UNCLEAR),
    ("RGB", {"exif": exif(65535), "icc_profile": of_rgb(WIDE, 2.2)}, Colours.PROFILE),
    ("RGB", {"icc_profile": of_inks(INKS)}, Colours.BROKEN),
    ("CMYK", {}, Colours.UNCLEAR),
    ("CMYK", {"icc_profile": of_inks(INKS)}, Colours.PROFILE),
])  # fmt: skip
def test_what_a_photograph_says_is_followed_or_named(tmp_path, mode, options, expected):
    Image.new(mode, (8, 8)).save(tmp_path / "a.jpg", **options)
    with Image.open(tmp_path / "a.jpg") as image:
        assert colours_of(image) is expected


@pytest.mark.parametrize("setting", ["convert", "ignore"])
def test_images_are_counted_by_what_becomes_of_their_colours(tmp_path, setting):
    """Five images, of which one has a profile, one a broken one, one none though it says so, and one is in Lab."""
    folder = tmp_path / "photos"
    folder.mkdir()
    image = Image.new("RGB", (8, 8), COLOUR)
    image.save(folder / "plain.png")
    image.save(folder / "wide.png", icc_profile=of_rgb(WIDE, 2.2))
    image.save(folder / "broken.png", icc_profile=b"no profile" * 20)
    image.save(folder / "unsaid.jpg", exif=exif(65535))
    to_lab = ImageCms.buildTransform(ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"), "RGB", "LAB")
    ImageCms.applyTransform(image, to_lab).save(folder / "lab.tif")
    section = DatasetParam(str(folder), 8, single_class=True, color_profiles=setting)
    rows = open_rows(section)
    read = source_of(section).visuals(rows, section, 3).read(np.arange(5), np.zeros(5)).arrays["pixels"]
    pixels = {Path(path).name: own[:, 4, 4].astype(int) for path, own in zip(rows.paths, read)}
    for note, name in zip(rows.notes, ("wide.png", "broken.png", "unsaid.jpg"), strict=True):
        assert "1 of 5 images" in note and name in note
    assert np.abs(pixels["wide.png"] - (in_srgb(COLOUR, WIDE, 2.2) if setting == "convert" else COLOUR)).max() <= 1
    for name in ("plain.png", "broken.png", "lab.tif"):  # one step of a in Lab is several levels of a weak red
        assert np.abs(pixels[name] - COLOUR).max() <= 6 * (name == "lab.tif")
    assert ("profiles ignored" in section.pixel_cache_key()) is (setting == "ignore")
