"""The pixels of an image, against the filters' definitions written out in NumPy and against frozen values."""

import struct
import zlib

import numpy as np
import pytest
from PIL import ExifTags, Image

from mindspeed_mm_dit.configs.files import UnusableFile
from mindspeed_mm_dit.data.colours import colours_of
from mindspeed_mm_dit.data.transforms import center_crop, load_pixels, open_image, upright_size


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


@pytest.mark.parametrize(
    ("height", "width"),
    [(8, 8), (8, 13), (15, 15), (16, 16), (17, 31), (31, 17), (32, 32), (50, 33), (5, 7), (9, 40), (64, 200)],
)
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
    assert np.asarray(center_crop(Image.fromarray(image(9, 11, 1).squeeze()), 4)).tolist() == [
        [73, 91, 162, 107], [108, 129, 106, 139], [185, 82, 106, 172], [91, 167, 109, 135],
    ]  # fmt: skip
    assert np.asarray(center_crop(Image.fromarray(image(3, 4, 1).squeeze()), 4)).tolist() == [
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
        with open_image(path, 8) as opened:
            colours_of(opened)  # (a run asks first, and Pillow reads EXIF data once)
            height, width = upright_size(opened)
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
