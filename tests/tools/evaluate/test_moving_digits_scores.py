import numpy as np
import pytest

from mindspeed_mm_dit.data.clip_reader import fit_frames
from mindspeed_mm_dit.errors import DataError
from mindspeed_mm_dit.tools.evaluate import demo_judges
from mindspeed_mm_dit.tools.evaluate.demo import CAPTIONS, DIRECTIONS, HELD_OUT, NAMES, OFFSETS, moving
from mindspeed_mm_dit.tools.evaluate.demo_judges import digits_line, read_digits, read_directions, score_moving_digits
from mindspeed_mm_dit.tools.evaluate.digits import FITTED_ON, real_digits


def clips_of(count=None):
    """Clips of digits that the classifier was not fitted on, over all directions and places; their captions."""
    digits, draws = real_digits(), np.random.default_rng(0)
    clips, captions = [], []
    for image, label in zip(digits.pixels[FITTED_ON:][:count].reshape(-1, 8, 8), digits.labels[FITTED_ON:]):
        direction = list(DIRECTIONS)[draws.integers(4)]
        clips.append(moving(image, direction, draws.choice(OFFSETS))[..., 0])
        captions.append(f"a {NAMES[label]} moves {direction}")
    return np.stack(clips), captions


@pytest.fixture(scope="module")
def real():
    return clips_of(200)


@pytest.fixture(scope="module", autouse=True)
def small_classifier():
    """Fit the classifier to a quarter of its digits, in a quarter of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_judges, "FITTED_ON", FITTED_ON // 4)
        demo_judges._classifier.cache_clear()
        yield
    demo_judges._classifier.cache_clear()


def test_clips_of_unseen_digits_are_read_right(real):
    found = score_moving_digits(*real)
    assert found.clips == 200 and found.direction == 1.0
    assert found.both == found.digit > 0.9
    assert found.both_held_out is not None and found.both_held_out > 0.85


@pytest.mark.extended
def test_whole_classifier_reads_96_percent(monkeypatch):
    monkeypatch.setattr(demo_judges, "FITTED_ON", FITTED_ON)
    demo_judges._classifier.cache_clear()
    assert score_moving_digits(*clips_of()).both == pytest.approx(0.96, abs=0.01)
    demo_judges._classifier.cache_clear()


def test_captions_of_other_clips_score_as_chance(real):
    clips, captions = real
    found = score_moving_digits(clips, np.random.default_rng(1).permutation(captions).tolist())
    assert found.both == pytest.approx(1 / 40, abs=0.03)
    assert found.digit == pytest.approx(1 / 10, abs=0.06) and found.direction == pytest.approx(1 / 4, abs=0.1)


def test_clips_of_a_smaller_size_and_rate_are_read(real):
    """As a data.json with max_height and max_width 12, num_frames 5 and train_fps 4 has them."""
    clips, captions = real
    small = np.stack([fit_frames(np.repeat(clip[::2, :, :, None], 3, 3), (12, 12))[0] for clip in clips])
    assert small.shape[1:] == (5, 12, 12) and score_moving_digits(small, captions).both > 0.9


@pytest.mark.parametrize(("shape", "size"), [((9, 32, 64), (8, 16)), ((17, 64, 32), (16, 8))])
def test_digits_are_read_on_rectangles(shape, size):
    digits, direction = real_digits(), "left" if size[1] > size[0] else "down"
    images = digits.pixels[FITTED_ON:][:200].reshape(-1, 8, 8)
    clips = [moving(image, direction, 0, shape)[::2, ..., :1] for image in images]
    small = np.stack([fit_frames(np.repeat(clip, 3, 3), size)[0] for clip in clips])
    assert np.mean(read_digits(small) == digits.labels[FITTED_ON:][:200]) > 0.85
    assert set(read_directions(small)) == {direction}


def test_clip_shown_backwards_moves_the_other_way(real):
    clips, _ = real
    other = {"left": "right", "right": "left", "up": "down", "down": "up", None: None}
    assert read_directions(clips[:, ::-1]) == [other[direction] for direction in read_directions(clips)]
    np.testing.assert_array_equal(read_digits(clips[:, ::-1]), read_digits(clips))


def test_clips_that_rest_or_are_empty_have_no_direction(real):
    clips, _ = real
    still, empty = np.repeat(clips[:, :1], clips.shape[1], 1), np.zeros_like(clips[:1])
    assert set(read_directions(np.concatenate([still, empty]))) == {None}
    dot = np.zeros((2, 2, 12, 12), np.uint8)
    dot[:, 0, 3, 3] = dot[0, 1, 3, 3 + 2] = dot[1, 1, 3, 3 + 1] = 255
    assert read_directions(dot) == ["right", None]


def test_captions_never_trained_on_are_scored_apart():
    digits = real_digits()
    clip = moving(digits.pixels[0].reshape(8, 8), "left", 4)[None, ..., 0]  # a zero
    seen = score_moving_digits(np.repeat(clip, 2, 0), ["a one moves left", "a zero moves right"])
    assert HELD_OUT[0] == "a zero moves left" and seen.both == 0 and seen.both_held_out is None
    found = score_moving_digits(np.repeat(clip, 2, 0), ["a one moves left", HELD_OUT[0]])
    assert (found.digit, found.direction, found.both, found.both_held_out) == (0.5, 1.0, 0.5, 1.0)


def test_digits_of_labels_alone_are_read_and_moves_counted():
    clip = moving(real_digits().pixels[0].reshape(8, 8), "left", 4)[None, ..., 0]  # a zero
    still = np.repeat(clip[:, :1], clip.shape[1], 1)
    line = digits_line(np.concatenate([clip, still, still]), [0, 1, 0])
    assert "66.7% of 3 clips" in line and "33.3% move" in line


def test_captions_and_sizes_that_are_not_known_are_refused():
    for shape, caption, words in (
        ((1, 5, 48, 48), "a dog runs", "a dog runs"), ((1, 5, 12, 36), CAPTIONS[0], "12 x 36"),
        ((1, 5, 32, 32), CAPTIONS[0], "32 x 32"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=words):
            score_moving_digits(np.zeros(shape, np.uint8), [caption])
