from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("av", reason="requirements/video.txt")
pytest.importorskip("tokenizers", reason="requirements/video.txt")

from mindspeed_mm_dit.configs.clips import ClipsParam
from mindspeed_mm_dit.data.clip_reader import ClipReader
from mindspeed_mm_dit.errors import DataError
from mindspeed_mm_dit.wings.scores.demo import moving_digits
from mindspeed_mm_dit.wings.scores.demo.moving_digits import (
    CAPTIONS,
    DIRECTIONS,
    HELD_OUT,
    NAMES,
    PLACES,
    SHAPES,
    _draw,
    moving,
    write_moving_digits,
)
from mindspeed_mm_dit.wings.scores.moving_digits import DARK
from tests.data_fixtures import open_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setattr(moving_digits, "NUM_CLIPS", 40)
    place = tmp_path_factory.mktemp("a") / "moving_digits"
    write_moving_digits(place)
    again = tmp_path_factory.mktemp("b") / "moving_digits"
    write_moving_digits(again)
    patch.undo()
    return place, again


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_same_files_are_written_each_time(folder):
    first, second = map(contents, folder)
    assert len(first) == 40 + 1 + 2 + 2 and first == second


def test_there_are_forty_captions_and_the_clips_are_of_them():
    assert len(set(CAPTIONS)) == 40 and "a seven moves left" in CAPTIONS


def test_of_each_direction_one_caption_has_no_clip():
    assert set(HELD_OUT) < set(CAPTIONS) and sorted(c.split()[-1] for c in HELD_OUT) == sorted(DIRECTIONS)
    drawn = {_draw(number, name)[0] for number in range(200) for name in NAMES}
    assert drawn == set(CAPTIONS) - set(HELD_OUT)
    assert {_draw(number, "two")[2] for number in range(100)} == set(PLACES)


def test_in_shapes_and_lengths_of_their_own_digits_cross_the_canvas_where_there_is_room():
    for frames, height, width in SHAPES:
        for direction, (rows, columns) in DIRECTIONS.items():
            room = abs(rows) * (height - 32) + abs(columns) * (width - 32)
            offered = {_draw(number, "two", (frames, height, width))[1] for number in range(40)}
            assert (direction in offered) == bool(room)
            if room:
                drawn = moving(np.full((8, 8), 16.0), direction, 0, (frames, height, width))
                ink = (drawn == 255).all(3)
                assert ink.shape == (frames, height, width) and (ink.sum((1, 2)) == 32 * 32).all()
                starts = [np.argwhere(frame).min(0) for frame in ink]
                assert (starts[-1] - starts[0]).tolist() == [rows * room, columns * room]


@pytest.mark.parametrize(
    ("direction", "axis", "sign"), [("left", 2, -1), ("right", 2, 1), ("up", 1, -1), ("down", 1, 1)]
)
def test_a_digit_moves_two_pixels_a_frame_the_way_its_caption_says(direction, axis, sign):
    drawn = moving(np.full((8, 8), 16.0), direction, 5)
    frames = np.where(drawn > 3 * moving_digits.LIGHT, drawn, 0)  # without the canvas
    assert drawn.shape == (9, 48, 48, 3) and (frames.sum((1, 2, 3)) == 32 * 32 * 3 * 255).all()
    places = [np.flatnonzero(frame.any(tuple({0, 1, 2} - {axis - 1}))).min() for frame in frames]
    assert np.diff(places).tolist() == [2 * sign] * 8 and min(places) == 0 and max(places) == 16
    other = 3 - axis
    assert all(np.flatnonzero(frame.any(tuple({0, 1, 2} - {other - 1}))).min() == 5 for frame in frames)


def test_the_empty_canvas_tells_frames_rows_and_columns_and_is_no_ink():
    canvas = moving(np.zeros((8, 8)), "left", 0).astype(int)[..., 0]
    assert all((np.diff(canvas, axis=axis) >= 0).all() for axis in range(3))
    assert canvas[0, 0, 0] == 0 and canvas[-1, -1, -1] == canvas.max() == 3 * moving_digits.LIGHT < DARK


def test_the_files_hold_what_was_drawn_to_a_few_levels(folder):
    from sklearn.datasets import load_digits

    entries = json.loads((folder[0] / "annotation.json").read_text())
    param = ClipsParam(str(folder[0]), str(folder[0] / "annotation.json"), 9, 48, 48)
    index = open_rows(param)
    pixels = ClipReader(index, param).read(np.arange(40), np.zeros(40)).arrays["pixels"]
    digits = load_digits()
    for number, entry in enumerate(entries):
        caption, direction, place = _draw(number, NAMES[digits.target[number]])
        assert entry["cap"] == caption == f"a {NAMES[digits.target[number]]} moves {direction}"
        drawn = moving(digits.images[number], direction, place).transpose(3, 0, 1, 2)
        assert np.abs(pixels[number].astype(int) - drawn).max() <= 8  # of 255, lost in MPEG-4 and YUV


def test_they_are_written_where_a_data_json_first_names_them(tmp_path, monkeypatch):
    monkeypatch.setattr(moving_digits, "NUM_CLIPS", 3)
    place = tmp_path / "data" / "moving_digits"
    param = ClipsParam(str(place), str(place / "annotation.json"), 9, 48, 48, source="moving_digits")
    before = open_rows(param)
    assert len(before) == 3 and open_rows(param).paths == before.paths
    with pytest.raises(DataError, match="must be named moving_digits"):
        open_rows(ClipsParam(str(tmp_path / "mine"), "a.json", 9, 48, 48, source="moving_digits"))
