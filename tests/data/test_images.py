"""Which images are kept decoded, and which one is read in the place of a bad one."""

import numpy as np
import pytest
from PIL import Image

from mindspeed_mm_dit.data import images
from mindspeed_mm_dit.data.images import ImageReader
from mindspeed_mm_dit.data.sources import Rows
from mindspeed_mm_dit.errors import DataError

UPRIGHT = np.zeros(4, bool)


@pytest.fixture
def index(tmp_path):
    """Four images of 4 x 4 in one colour each; the second cannot be decoded."""
    paths = tuple(str(tmp_path / f"{number}.png") for number in range(4))
    for number, path in enumerate(paths):
        Image.new("RGB", (4, 4), (number, 10, 20)).save(path)
    (tmp_path / "1.png").write_bytes(b"no image")
    return Rows(paths, {"label": np.arange(4)})


@pytest.fixture
def decoded(monkeypatch):
    """The files that were decoded, in their order."""
    noted, load = [], images.load_pixels
    monkeypatch.setattr(images, "load_pixels", lambda path, *rest: noted.append(path[-5:]) or load(path, *rest))
    return noted


@pytest.mark.parametrize(("spare_bytes", "times"), [(0, 1), (-1, 2)])
def test_images_that_fit_into_memory_are_decoded_once(index, decoded, monkeypatch, spare_bytes, times):
    monkeypatch.setattr(images, "CACHE_BYTES", 4 * 3 * 4 * 4 + spare_bytes)  # images, channels, height, width
    reader = ImageReader(index, 4, 3)
    for _ in range(2):
        pixels = reader.read(np.array([2, 3]), UPRIGHT[:2]).arrays["pixels"]
        assert pixels[:, 0, 0, 0].tolist() == [2, 3] and pixels.shape == (2, 3, 4, 4)
    assert decoded == ["2.png", "3.png"] * times


@pytest.mark.parametrize("keep", [True, False])
def test_an_image_that_stays_the_same_in_memory_is_mirrored_anew_each_time(index, monkeypatch, keep):
    Image.fromarray(np.arange(16, dtype=np.uint8).reshape(4, 4)).save(index.paths[0])
    monkeypatch.setattr(images, "CACHE_BYTES", 1 << 20 if keep else 0)
    reader = ImageReader(index, 4, 1)
    for flip in (True, False, True):
        pixels = reader.read(np.array([0]), np.array([flip])).arrays["pixels"][0, 0, 0]
        assert pixels.tolist() == ([3, 2, 1, 0] if flip else [0, 1, 2, 3])


def test_skipped_image_is_tried_and_named_once(index, decoded, capsys):
    reader = ImageReader(index, 4, 3, skip_bad=True)
    for _ in range(3):
        assert reader.read(np.arange(4), UPRIGHT).rows.tolist() == [0, 2, 2, 3]
    assert decoded.count("1.png") == 1
    assert capsys.readouterr().err.count(f"{index.paths[1]} cannot be decoded") == 1


def test_bad_image_is_an_error_every_time_unless_skipped(index):
    reader = ImageReader(index, 4, 3)
    for _ in range(2):
        with pytest.raises(DataError, match=r"1\.png: cannot be decoded: it is not an image"):
            reader.read(np.array([1]), UPRIGHT[:1])
