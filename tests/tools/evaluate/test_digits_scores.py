"""Scores of pictures and clips of digits, without a published network: each says what its name says."""

import numpy as np
import pytest
from scipy.spatial.distance import cdist, pdist

from mindspeed_mm_dit.data.clip_reader import fit_frames
from mindspeed_mm_dit.errors import DataError
from mindspeed_mm_dit.tools.evaluate import demo, demo_judges, digits
from mindspeed_mm_dit.tools.evaluate.demo import CAPTIONS, DIRECTIONS, HELD_OUT, NAMES, OFFSETS, moving
from mindspeed_mm_dit.tools.evaluate.demo_judges import digits_line, read_digits, read_directions, score_moving_digits
from mindspeed_mm_dit.tools.evaluate.digits import (
    FITTED_ON,
    PHRASINGS,
    real_digits,
    score_captioned_digits,
    score_digits,
)


def as_images(pixels):
    return np.round(np.clip(pixels, 0, 16) * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)


def test_feature_space_holds_95_percent_of_the_variance():
    real = real_digits()
    kept = real.features(real.pixels).var(0).sum() / real.pixels.var(0).sum()
    components = real.space.components_
    assert components.shape == (29, 64) and 0.95 <= kept < 0.96
    np.testing.assert_allclose(components @ components.T, np.eye(29), atol=1e-12)


def test_copies_are_counted_with_noise_but_not_lighter_digits():
    real, noise = real_digits(), np.random.default_rng(0).normal(0, 1, (300, 64))
    apart = cdist(real.pixels, real.pixels) + np.diag(np.full(1797, np.inf))
    assert (apart.min(1) < real.copy_distance).mean() == pytest.approx(0.01, abs=2e-3)  # one real digit in a hundred
    pixels, labels = real.pixels[:300], real.labels[:300]
    exact, noisy, lighter = (score_digits(as_images(each), labels) for each in (pixels, pixels + noise, pixels * 0.75))
    assert exact.copies == 300 and noisy.copies >= 295 and lighter.copies == 0
    assert exact.accuracy > 0.99 and exact.precision == 1.0  # which alone would look like a perfect model


def test_variety_is_the_distance_within_a_class_over_the_real():
    real, rows = real_digits(), np.arange(1797) < 600
    found = score_digits(as_images(real.pixels[rows]), real.labels[rows]).variety
    own = [(real.pixels[rows & (real.labels == c)], real.pixels[real.labels == c]) for c in range(10)]
    shares = [pdist(few).mean() / pdist(every).mean() for few, every in own]
    assert found == pytest.approx(np.mean(shares), rel=1e-2)  # images are rounded to bytes
    labels = np.repeat(np.arange(10), 10)
    means = np.stack([real.pixels[real.labels == digit].mean(0) for digit in labels])
    found = score_digits(as_images(means), labels)
    assert found.accuracy == 1.0 and found.variety == 0.0 and found.recall == 0.0


def test_real_digits_score_as_real_ones():
    found = digits.scores_of_real_digits(900)
    assert found.accuracy > 0.98 and found.precision == 1.0 and found.recall > 0.9
    assert found.variety == pytest.approx(1.0, abs=0.02) and found.frechet < 10
    assert found.copies == 900
    unseen = real_digits().pixels[1200:], real_digits().labels[1200:]
    assert digits.digits_accuracy(as_images(unseen[0]), unseen[1]) == pytest.approx(0.97, abs=0.01)


def real_images(asked):
    """A real image of each digit, of those that the classifier was not fitted on."""
    found = demo.read_digits()
    images = np.round(found.images * (255 / 16)).astype(np.uint8)[1200:, :, :, None]
    return np.stack([images[np.flatnonzero(found.labels[1200:] == digit)[n % 40]] for n, digit in enumerate(asked)])


def test_real_digits_are_read_as_asked():
    right = [demo.DIGIT_OF[caption] for caption in PHRASINGS]
    found = score_captioned_digits(real_images(right), PHRASINGS)
    assert found.seen > 0.95 and found.unseen > 0.95 and found.images == 400
    wrong = [digit if n < 200 else (digit + 1) % 10 for n, digit in enumerate(right)]
    found = score_captioned_digits(real_images(wrong), PHRASINGS)
    assert found.seen > 0.95 and found.unseen < 0.05
    with pytest.raises(DataError, match="a dog"):
        score_captioned_digits(real_images([1, 2]), ("the number 1", "a dog"))


def test_phrasings_ask_for_each_digit_equally():
    kinds = (demo.SEEN, demo.UNSEEN)
    seen, unseen = ({each for digit in range(10) for each in demo.captions_of(digit, kind)} for kind in kinds)
    assert len(PHRASINGS) == 400 and [caption in seen for caption in PHRASINGS] == [True] * 200 + [False] * 200
    for kind in (PHRASINGS[:200], PHRASINGS[200:]):
        assert np.bincount([demo.DIGIT_OF[caption] for caption in kind]).tolist() == [20] * 10
    assert set(PHRASINGS[200:]) == unseen


def clips_of(count=None):
    """Clips of digits that the classifier was not fitted on, over all directions and places; their captions."""
    real, draws = real_digits(), np.random.default_rng(0)
    clips, captions = [], []
    for image, label in zip(real.pixels[FITTED_ON:][:count].reshape(-1, 8, 8), real.labels[FITTED_ON:]):
        direction = list(DIRECTIONS)[draws.integers(4)]
        clips.append(moving(image, direction, draws.choice(OFFSETS))[..., 0])
        captions.append(f"a {NAMES[label]} moves {direction}")
    return np.stack(clips), captions


@pytest.fixture(scope="module")
def real():
    """Two hundred of them, read by a classifier that is fitted to a quarter of its digits, in a quarter of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_judges, "FITTED_ON", FITTED_ON // 4)
        demo_judges._classifier.cache_clear()
        yield clips_of(200)
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
def test_digits_are_read_on_rectangles(real, shape, size):
    direction, unseen = "left" if size[1] > size[0] else "down", slice(FITTED_ON, FITTED_ON + 200)
    images = real_digits().pixels[unseen].reshape(-1, 8, 8)
    clips = [moving(image, direction, 0, shape)[::2, ..., :1] for image in images]
    small = np.stack([fit_frames(np.repeat(clip, 3, 3), size)[0] for clip in clips])
    assert np.mean(read_digits(small) == real_digits().labels[unseen]) > 0.85
    assert set(read_directions(small)) == {direction}


def test_direction_is_that_of_the_frames(real):
    clips, _ = real
    other = {"left": "right", "right": "left", "up": "down", "down": "up", None: None}
    assert read_directions(clips[:, ::-1]) == [other[direction] for direction in read_directions(clips)]
    np.testing.assert_array_equal(read_digits(clips[:, ::-1]), read_digits(clips))
    still, empty = np.repeat(clips[:, :1], clips.shape[1], 1), np.zeros_like(clips[:1])
    assert set(read_directions(np.concatenate([still, empty]))) == {None}
    dot = np.zeros((2, 2, 12, 12), np.uint8)
    dot[:, 0, 3, 3] = dot[0, 1, 3, 3 + 2] = dot[1, 1, 3, 3 + 1] = 255
    assert read_directions(dot) == ["right", None]


def test_clips_are_scored_by_captions_held_out_or_by_labels(real):
    clip = moving(real_digits().pixels[0].reshape(8, 8), "left", 4)[None, ..., 0]  # a zero
    seen = score_moving_digits(np.repeat(clip, 2, 0), ["a one moves left", "a zero moves right"])
    assert HELD_OUT[0] == "a zero moves left" and seen.both == 0 and seen.both_held_out is None
    found = score_moving_digits(np.repeat(clip, 2, 0), ["a one moves left", HELD_OUT[0]])
    assert (found.digit, found.direction, found.both, found.both_held_out) == (0.5, 1.0, 0.5, 1.0)
    still = np.repeat(clip[:, :1], clip.shape[1], 1)
    line = digits_line(np.concatenate([clip, still, still]), [0, 1, 0])
    assert "66.7% of 3 clips" in line and "33.3% move" in line


def test_captions_and_sizes_that_are_not_known_are_refused():
    rows = (((48, 48), "a dog runs", "a dog"), ((12, 36), CAPTIONS[0], "12 x 36"), ((32, 32), CAPTIONS[0], "32 x 32"))
    for size, caption, words in rows:
        with pytest.raises(DataError, match=words):
            score_moving_digits(np.zeros((1, 5, *size), np.uint8), [caption])
