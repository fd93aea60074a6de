"""The pixels of an image and its colours, against definitions written out in NumPy and against frozen values."""

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageCms, features

from mindspeed_mm_dit.configs.files import UnusableFile
from mindspeed_mm_dit.configs.images import DatasetParam
from mindspeed_mm_dit.data import transforms
from mindspeed_mm_dit.data.sources import source_of
from mindspeed_mm_dit.data.transforms import Colours, colours_of, load_pixels, readable_formats
from tests.colour_fixtures import SRGB, WIDE, in_srgb, of_grey, of_inks, of_rgb
from tests.data_fixtures import open_rows


def image(height, width, channels):
    """Fine detail on slopes, so that every filter gives other pixels, and every place another value."""
    rows, columns, channel = np.mgrid[:height, :width, :channels]
    return ((rows * 41 + columns * 97 + channel * 29 + rows * columns * 13) % 251).astype(np.uint8)


def box(distance):
    return ((distance > -0.5) & (distance <= 0.5)).astype(float)


def cubic(distance):
    """The interpolation kernel of Keys 1981 with a = -1/2."""
    x = np.abs(distance)
    near, far = ((1.5 * x - 2.5) * x) * x + 1, (((x - 5) * x + 8) * x - 4) * -0.5
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


def resized(pixels, width, height, kernel):
    """``pixels`` (H, W, C) at another size: widened kernels where it shrinks; first rows, then columns, as 8 bits."""
    for axis, size in ((1, width), (0, height)):
        scale = pixels.shape[axis] / size
        centres = (np.arange(size) + 0.5) * scale
        places = np.arange(pixels.shape[axis]) + 0.5
        weights = kernel((places - centres[:, None]) / max(scale, 1.0))  # (size, pixels.shape[axis])
        weights /= weights.sum(1, keepdims=True)
        pixels = np.moveaxis(np.tensordot(weights, pixels, (1, axis)), 0, axis)
        pixels = np.clip(np.floor(pixels + 0.5), 0, 255)
    return pixels


def cropped(pixels, size):
    """The published preparation: halve while twice too large, scale the shorter side, cut the centre."""
    while min(pixels.shape[:2]) >= 2 * size:
        pixels = resized(pixels, pixels.shape[1] // 2, pixels.shape[0] // 2, box)
    height, width = (round(side * size / min(pixels.shape[:2])) for side in pixels.shape[:2])
    pixels = resized(pixels, width, height, cubic)
    top, left = (height - size) // 2, (width - size) // 2
    return pixels[top : top + size, left : left + size]


SIZES = [(8, 8), (8, 13), (15, 15), (16, 16), (17, 31), (31, 17), (32, 32), (50, 33), (5, 7), (9, 40), (64, 200)]


@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize("channels", [1, 3])
def test_an_image_is_halved_by_box_scaled_bicubically_and_cut(tmp_path, height, width, channels):
    pixels = image(height, width, channels)
    Image.fromarray(pixels.squeeze()).save(tmp_path / "image.png")
    found = load_pixels(str(tmp_path / "image.png"), 8, channels)
    assert found.shape == (channels, 8, 8) and found.dtype == np.uint8
    # Pillow's weights are whole numbers of 2**-22: a value between two levels may fall to either.
    difference = found.transpose(1, 2, 0) - cropped(pixels.astype(float), 8)
    assert np.abs(difference).max() <= 1 and (difference != 0).mean() < 0.01


def test_the_pixels_of_a_small_image_are_fixed():
    """A change here makes latent caches and losses other ones: it needs a note in the changelog, and another CROP."""
    assert np.asarray(transforms.center_crop(Image.fromarray(image(9, 11, 1).squeeze()), 4)).tolist() == [
        [73, 91, 162, 107], [108, 129, 106, 139], [185, 82, 106, 172], [91, 167, 109, 135],
    ]  # fmt: skip
    assert np.asarray(transforms.center_crop(Image.fromarray(image(3, 4, 1).squeeze()), 4)).tolist() == [
        [0, 60, 165, 165], [20, 101, 107, 73], [54, 153, 98, 49], [79, 183, 144, 106],
    ]  # fmt: skip


@pytest.mark.parametrize(("mode", "value", "rgb"), [
    ("L", 7, (7, 7, 7)), ("RGB", (1, 2, 3), (1, 2, 3)), ("RGBA", (1, 2, 3, 0), (255, 255, 255)), ("P", 3, (3, 3, 3)),
    ("CMYK", (255, 0, 0, 0), (0, 255, 255)), ("1", 1, (255, 255, 255)), ("LA", (5, 128), (130, 130, 130)),
])  # fmt: skip
def test_images_of_every_mode_become_rgb(tmp_path, mode, value, rgb):
    image = Image.new(mode, (8, 8), value)
    if mode == "P":
        image.putpalette([level for level in range(256) for _ in range(3)])
    image.save(tmp_path / ("image.tif" if mode == "CMYK" else "image.png"))
    found = load_pixels(str(next(tmp_path.iterdir())), 8, 3)
    assert found.transpose(1, 2, 0).tolist() == np.broadcast_to(rgb, (8, 8, 3)).tolist()


def chunk(kind, content):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


@pytest.mark.parametrize(("bits", "levels", "transparent"), [
    (1, [0, 1] * 4, [1]), (2, [0, 1, 2, 3] * 2, [2]), (4, list(range(8)), [3]), (8, list(range(8)), [3]),
    (16, [9, 257, 258, 2570, 30, 40, 50, 60], [257]), (16, [[n, 0, 0] for n in range(0, 8 * 257, 257)], [514, 0, 0]),
    (8, [[n, n, 0] for n in range(8)], [5, 5, 0]),
])  # fmt: skip
def test_transparent_color_of_a_png_shows_white(bits, levels, transparent):
    grey, stored = np.ndim(levels) == 1, np.array(levels, ">u2" if bits == 16 else np.uint8)
    body = stored.tobytes() if bits >= 8 else np.packbits(np.unpackbits(stored[:, None], 1)[:, -bits:]).tobytes()
    header = struct.pack(">IIBBBBB", 8, 1, bits, 0 if grey else 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"tRNS", struct.pack(f">{len(transparent)}H", *transparent)),
              (b"IDAT", zlib.compress(b"\0" + body)), (b"IEND", b"")]  # fmt: skip
    pixels = load_pixels(b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*own) for own in chunks), (1, 8), 3)[:, 0].T
    right = np.round(stored.reshape(8, -1) * (255 / (2**bits - 1))) + np.zeros(3)
    right[[list(np.atleast_1d(level)) == transparent for level in levels]] = 255
    assert pixels.tolist() == right.tolist()


XMP = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="%d"/></x:xmpmeta>'


@pytest.mark.parametrize("kind", ["png", "tiff", "16 bits", "eXIf behind the pixels", "XMP behind the pixels"])
def test_image_stands_as_its_exif_data_say(tmp_path, kind):
    pixels, exif = image(8, 12, 1 if kind == "16 bits" else 3), Image.Exif()
    stored = pixels[..., 0].astype(np.uint16) * 257 if kind == "16 bits" else pixels
    path = tmp_path / ("image.tiff" if kind == "tiff" else "image.png")
    for orientation in range(1, 9):
        exif[ExifTags.Base.Orientation] = orientation
        Image.fromarray(stored).save(path, **({} if "behind" in kind else {"exif": exif}))
        if "behind" in kind:
            late = chunk(b"eXIf", exif.tobytes()[6:])
            if "XMP" in kind:
                late = chunk(b"iTXt", b"XML:com.adobe.xmp" + bytes(5) + XMP % orientation)
            path.write_bytes(path.read_bytes()[:-12] + late + path.read_bytes()[-12:])
        with transforms.open_image(path, 8) as opened:
            colours_of(opened)  # (a run asks first, and Pillow reads EXIF data once)
            height, width = transforms.upright_size(opened)
        assert (height, width) == ((12, 8) if orientation > 4 else (8, 12))
        rows = pixels[:, ::-1] if orientation in (2, 3, 7, 8) else pixels
        rows = rows[::-1] if orientation in (3, 4, 6, 7) else rows
        rows = rows.transpose(1, 0, 2) if orientation > 4 else rows
        found = load_pixels(str(path), (height, width), pixels.shape[2])
        np.testing.assert_array_equal(found, rows.transpose(2, 0, 1))


def test_pixels_of_32_bits_are_refused(tmp_path):
    for kind in (np.float32, np.int32):
        Image.fromarray(np.ones((8, 8), kind)).save(tmp_path / "image.tif")
        pytest.raises(UnusableFile, load_pixels, str(tmp_path / "image.tif"), 8, 1).match("has 32 bits a pixel")


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
    assert (transforms.load_still(tmp_path / f"a.{ending}", 8)[4, 4] == found).all()
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


def png_with(name: bytes, content: bytes) -> bytes:
    """A PNG of 8 x 8 with one more chunk."""
    rows = b"".join(b"\0" + bytes(COLOUR) * 8 for _ in range(8))
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0))
    chunks = (header, chunk(name, content), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def exif_of(space, interoperability=None):
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
    ("RGB", {"exif": exif_of(1, "R98")}, Colours.SRGB),
    ("RGB", {"exif": exif_of(65535)}, Colours.UNCLEAR),
    ("RGB", {"exif": exif_of(2)}, Colours.UNCLEAR),
    ("RGB", {"exif": exif_of(1, "R03")}, Colours.UNCLEAR),
    ("RGB", {"exif": exif_of(65535), "icc_profile": of_rgb(WIDE, 2.2)}, Colours.PROFILE),
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
    image.save(folder / "unsaid.jpg", exif=exif_of(65535))
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
