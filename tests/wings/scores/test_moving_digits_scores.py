from __future__ import annotations

import numpy as np
import pytest

from benchmarks.moving_digits_i2v import score_begun
from mindspeed_mm_dit.data.frames import fit_frames
from mindspeed_mm_dit.errors import DataError
from mindspeed_mm_dit.wings.scores.demo.moving_digits import CAPTIONS, DIRECTIONS, HELD_OUT, NAMES, PLACES, moving
from mindspeed_mm_dit.wings.scores.digits import FITTED_ON, real_digits
from mindspeed_mm_dit.wings.scores.moving_digits import (
    digits_line,
    read_digits,
    read_directions,
    score_moving_digits,
)


@pytest.fixture(scope="module")
def real():
    """Clips of the 597 digits that the classifier was not fitted on, over all directions and places; their captions."""
    digits = real_digits()
    draws = np.random.default_rng(0)
    clips, captions = [], []
    for image, label in zip(digits.pixels[FITTED_ON:].reshape(-1, 8, 8), digits.labels[FITTED_ON:]):
        direction = list(DIRECTIONS)[draws.integers(4)]
        clips.append(moving(image, direction, draws.choice(PLACES))[..., 0])
        captions.append(f"a {NAMES[label]} moves {direction}")
    return np.stack(clips), captions


def test_clips_of_real_digits_that_were_not_fitted_on_are_read_right(real):
    found = score_moving_digits(*real)
    assert found.clips == 597 and found.direction == 1.0
    assert found.both == found.digit == pytest.approx(0.96, abs=0.01)
    assert found.both_held_out is not None and found.both_held_out > 0.9


def test_captions_of_other_clips_score_as_chance_does(real):
    clips, captions = real
    found = score_moving_digits(clips, np.random.default_rng(1).permutation(captions).tolist())
    assert found.both == pytest.approx(1 / 40, abs=0.015)
    assert found.digit == pytest.approx(1 / 10, abs=0.03) and found.direction == pytest.approx(1 / 4, abs=0.05)


def test_a_clip_that_keeps_the_digit_it_was_given_is_told_from_one_that_keeps_its_class_alone(real):
    clips, captions = real[0][:, ::2], real[1]  # (every second frame moves by a whole pixel of a digit)
    kept = score_begun(clips, captions, clips[:, 0])
    assert kept.kept > 0.99 and kept.direction == 1.0 and kept.distance < 1 < kept.distance_of_others / 3
    of_class, draw = {}, np.random.default_rng(3)
    for number, caption in enumerate(captions):
        of_class.setdefault(caption.split()[1], []).append(number)
    others = np.array([draw.choice(of_class[caption.split()[1]]) for caption in captions])
    swapped = score_begun(clips[others], captions, clips[:, 0])
    assert swapped.kept == pytest.approx(0.5, abs=0.12)  # (digits by the same few writers)
    assert swapped.distance == pytest.approx(swapped.distance_of_others, rel=0.1)


def test_some_noise_changes_little(real):
    clips, captions = real
    noise = np.random.default_rng(2).normal(0, 20, clips.shape)
    found = score_moving_digits(np.clip(clips + noise, 0, 255).astype(np.uint8), captions)
    assert found.both > 0.9


def test_clips_of_a_quarter_of_the_size_and_half_the_rate_are_read_as_well(real):
    """As a data.json with max_height and max_width 12, num_frames 5 and train_fps 4 has them."""
    clips, captions = real
    small = np.stack([fit_frames(np.repeat(clip[::2, :, :, None], 3, 3), (12, 12))[0] for clip in clips])
    assert small.shape[1:] == (5, 12, 12) and score_moving_digits(small, captions).both > 0.95


@pytest.mark.parametrize(("shape", "size"), [((9, 32, 64), (8, 16)), ((17, 64, 32), (16, 8))])
def test_digits_are_read_as_well_on_rectangles(shape, size):
    digits = real_digits()
    clips = [
        moving(image, "left" if size[1] > size[0] else "down", 0, shape)[::2, ..., :1]
        for image in digits.pixels[FITTED_ON:].reshape(-1, 8, 8)
    ]
    small = np.stack([fit_frames(np.repeat(clip, 3, 3), size)[0] for clip in clips])
    assert np.mean(read_digits(small) == digits.labels[FITTED_ON:]) > 0.94
    assert set(read_directions(small)) == {"left" if size[1] > size[0] else "down"}


def test_a_clip_shown_backwards_moves_the_other_way(real):
    clips, _ = real
    other = {"left": "right", "right": "left", "up": "down", "down": "up", None: None}
    assert read_directions(clips[:, ::-1]) == [other[direction] for direction in read_directions(clips)]
    np.testing.assert_array_equal(read_digits(clips[:, ::-1]), read_digits(clips))


def test_clips_that_rest_are_empty_or_go_less_than_half_the_way_have_no_direction(real):
    clips, _ = real
    still, empty = np.repeat(clips[:, :1], clips.shape[1], 1), np.zeros_like(clips[:1])
    assert set(read_directions(np.concatenate([still, empty]))) == {None}
    dot = np.zeros((2, 2, 12, 12), np.uint8)
    dot[:, 0, 3, 3] = dot[0, 1, 3, 3 + 2] = dot[1, 1, 3, 3 + 1] = 255
    assert read_directions(dot) == ["right", None]


def test_what_was_never_trained_on_is_scored_apart():
    digits = real_digits()
    clip = moving(digits.pixels[0].reshape(8, 8), "left", 4)[None, ..., 0]  # a zero
    seen = score_moving_digits(np.repeat(clip, 2, 0), ["a one moves left", "a zero moves right"])
    assert HELD_OUT[0] == "a zero moves left" and seen.both == 0 and seen.both_held_out is None
    found = score_moving_digits(np.repeat(clip, 2, 0), ["a one moves left", HELD_OUT[0]])
    assert (found.digit, found.direction, found.both, found.both_held_out) == (0.5, 1.0, 0.5, 1.0)
    assert found.line == (
        "moving digits score: 50.0% of 2 clips show the digit that was asked for moving as asked (digit 50.0%, "
        "direction 100.0%); of captions never trained on 100.0%"
    )


def test_of_digits_asked_for_alone_it_is_said_how_many_are_read_and_how_many_move():
    clip = moving(real_digits().pixels[0].reshape(8, 8), "left", 4)[None, ..., 0]  # a zero
    still = np.repeat(clip[:, :1], clip.shape[1], 1)
    line = "moving digits score: 66.7% of 3 clips show the digit that was asked for; 33.3% move"
    assert digits_line(np.concatenate([clip, still, still]), [0, 1, 0]) == line


def test_a_caption_that_is_none_of_them_is_named():
    with pytest.raises(DataError, match="'a dog runs'"):
        score_moving_digits(np.zeros((1, 5, 48, 48), np.uint8), ["a dog runs"])
    assert len(CAPTIONS) == 40


def test_clips_that_cannot_be_shrunk_are_refused():
    for shape in ((1, 5, 12, 36), (1, 5, 32, 32)):
        with pytest.raises(DataError, match=f"clips of {shape[2]} x {shape[3]} pixels"):
            score_moving_digits(np.zeros(shape, np.uint8), CAPTIONS[:1])
