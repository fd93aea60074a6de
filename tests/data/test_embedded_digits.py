"""The embedded data sets are the same files each time, and hold what their captions and classes say."""

import json
import re

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("av", reason="requirements/video.txt")
pytest.importorskip("tokenizers", reason="requirements/video.txt")

from mindspeed_mm_dit.configs.images import ClipsParam
from mindspeed_mm_dit.data.builtin import IMAGES
from mindspeed_mm_dit.data.clip_reader import ClipReader
from mindspeed_mm_dit.tools.evaluate import demo
from mindspeed_mm_dit.tools.evaluate.demo import NAMES, _draw, moving
from mindspeed_mm_dit.tools.evaluate.demo_judges import BUILT_IN
from tests.data_fixtures import open_rows

CLIPS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    places = [tmp_path_factory.mktemp(name) / "moving_digits" for name in "ab"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "NUM_CLIPS", CLIPS)
        for place in places:
            demo.write_moving_digits(place)
    return places


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_same_files_are_written_each_time_with_what_was_drawn(folder):
    first, second = map(contents, folder)
    assert len(first) == CLIPS + 1 + 2 + 2 and first == second
    entries = json.loads((folder[0] / "annotation.json").read_text())
    param = ClipsParam(str(folder[0]), str(folder[0] / "annotation.json"), 9, 48, 48)
    pixels = ClipReader(open_rows(param), param).read(np.arange(CLIPS), np.zeros(CLIPS)).arrays["pixels"]
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    for number, entry in enumerate(entries):
        caption, direction, place = _draw(number, NAMES[digits.target[number]])
        assert entry["cap"] == caption == f"a {NAMES[digits.target[number]]} moves {direction}"
        drawn = moving(digits.images[number], direction, place).transpose(3, 0, 1, 2)
        assert np.abs(pixels[number].astype(int) - drawn).max() <= 8  # of 255, lost in MPEG-4 and YUV


def test_of_each_direction_one_caption_has_no_clip():
    held_out = set(demo.HELD_OUT)
    assert held_out < set(demo.CAPTIONS) and sorted(c.split()[-1] for c in held_out) == sorted(demo.DIRECTIONS)
    drawn = {_draw(number, name)[0] for number in range(200) for name in NAMES}
    assert drawn == set(demo.CAPTIONS) - held_out
    assert {_draw(number, "two")[2] for number in range(100)} == set(demo.OFFSETS)


@pytest.mark.parametrize(("where", "axis", "sign"), [("left", 2, -1), ("right", 2, 1), ("up", 1, -1), ("down", 1, 1)])
def test_digit_moves_two_pixels_a_frame_as_its_caption_says(where, axis, sign):
    drawn = moving(np.full((8, 8), 16.0), where, 5)
    frames = drawn > 3 * demo.LIGHT  # without the canvas
    assert drawn.shape == (9, 48, 48, 3) and (frames.sum((1, 2, 3)) == 32 * 32 * 3).all()
    starts = np.array([np.argwhere(frame).min(0) for frame in frames])
    assert np.diff(starts[:, axis - 1]).tolist() == [2 * sign] * 8 and sorted(starts[[0, -1], axis - 1]) == [0, 16]
    assert (starts[:, 2 - axis] == 5).all()


def test_inverted_digits_are_black_on_white_and_so_is_their_score(tmp_path):
    IMAGES["inverted_digits"].write(tmp_path / "inverted_digits")
    files = sorted((tmp_path / "inverted_digits").glob("*/*.png"))
    assert [sum(file.parent.name == str(label) for file in files) for label in range(10)] == [4] * 10
    images = np.stack([np.asarray(Image.open(file)) for file in files])
    assert images.shape == (40, 8, 8) and (images > 127).mean() > 0.6
    digits = demo.read_digits()
    first = np.flatnonzero(digits.labels == 7)[0]
    assert np.array_equal(255 - images[28], np.round(digits.images[first] * (255 / 16)).astype(np.uint8))
    white = np.round(digits.images[1200:] * (255 / 16)).astype(np.uint8)[..., None]
    asked = {"label": digits.labels[1200:]}
    scores = (BUILT_IN["inverted_digits", "label"].score(images, asked) for images in (255 - white, white))
    black, unchanged = (float(re.match(r"inverted, digits score: ([\d.]+)%", score)[1]) for score in scores)
    assert black > 95 and unchanged < 20
