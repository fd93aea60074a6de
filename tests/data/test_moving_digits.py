import json

import numpy as np
import pytest

pytest.importorskip("av", reason="requirements/video.txt")
pytest.importorskip("tokenizers", reason="requirements/video.txt")

from mindspeed_mm_dit.configs.images import ClipsParam
from mindspeed_mm_dit.data.clip_reader import ClipReader
from mindspeed_mm_dit.tools.evaluate import demo
from mindspeed_mm_dit.tools.evaluate.demo import (
    CAPTIONS,
    DIRECTIONS,
    HELD_OUT,
    NAMES,
    OFFSETS,
    _draw,
    moving,
    write_moving_digits,
)
from tests.data_fixtures import open_rows

CLIPS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setattr(demo, "NUM_CLIPS", CLIPS)
    place = tmp_path_factory.mktemp("a") / "moving_digits"
    write_moving_digits(place)
    again = tmp_path_factory.mktemp("b") / "moving_digits"
    write_moving_digits(again)
    patch.undo()
    return place, again


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_same_files_are_written_each_time_with_what_was_drawn(folder):
    from sklearn.datasets import load_digits

    first, second = map(contents, folder)
    assert len(first) == CLIPS + 1 + 2 + 2 and first == second
    entries = json.loads((folder[0] / "annotation.json").read_text())
    param = ClipsParam(str(folder[0]), str(folder[0] / "annotation.json"), 9, 48, 48)
    pixels = ClipReader(open_rows(param), param).read(np.arange(CLIPS), np.zeros(CLIPS)).arrays["pixels"]
    digits = load_digits()
    for number, entry in enumerate(entries):
        caption, direction, place = _draw(number, NAMES[digits.target[number]])
        assert entry["cap"] == caption == f"a {NAMES[digits.target[number]]} moves {direction}"
        drawn = moving(digits.images[number], direction, place).transpose(3, 0, 1, 2)
        assert np.abs(pixels[number].astype(int) - drawn).max() <= 8  # of 255, lost in MPEG-4 and YUV


def test_of_each_direction_one_caption_has_no_clip():
    assert set(HELD_OUT) < set(CAPTIONS) and sorted(c.split()[-1] for c in HELD_OUT) == sorted(DIRECTIONS)
    drawn = {_draw(number, name)[0] for number in range(200) for name in NAMES}
    assert drawn == set(CAPTIONS) - set(HELD_OUT)
    assert {_draw(number, "two")[2] for number in range(100)} == set(OFFSETS)


@pytest.mark.parametrize(
    ("direction", "axis", "sign"), [("left", 2, -1), ("right", 2, 1), ("up", 1, -1), ("down", 1, 1)]
)
def test_digit_moves_two_pixels_a_frame_as_its_caption_says(direction, axis, sign):
    drawn = moving(np.full((8, 8), 16.0), direction, 5)
    frames = drawn > 3 * demo.LIGHT  # without the canvas
    assert drawn.shape == (9, 48, 48, 3) and (frames.sum((1, 2, 3)) == 32 * 32 * 3).all()
    starts = np.array([np.argwhere(frame).min(0) for frame in frames])
    assert np.diff(starts[:, axis - 1]).tolist() == [2 * sign] * 8 and sorted(starts[[0, -1], axis - 1]) == [0, 16]
    assert (starts[:, 2 - axis] == 5).all()
