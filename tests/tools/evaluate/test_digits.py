import numpy as np
import pytest
from scipy.spatial.distance import cdist, pdist

from mindspeed_mm_dit.errors import DataError
from mindspeed_mm_dit.tools.evaluate.demo import DIGIT_OF, SEEN, UNSEEN, captions_of, read_digits
from mindspeed_mm_dit.tools.evaluate.digits import (
    PHRASINGS,
    digits_accuracy,
    real_digits,
    score_captioned_digits,
    score_digits,
    scores_of_real_digits,
)


def as_images(pixels):
    return np.round(np.clip(pixels, 0, 16) * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)


def test_feature_space_holds_95_percent_of_the_variance():
    real = real_digits()
    kept = real.features(real.pixels).var(0).sum() / real.pixels.var(0).sum()
    components = real.space.components_
    assert components.shape == (29, 64) and 0.95 <= kept < 0.96
    np.testing.assert_allclose(components @ components.T, np.eye(29), atol=1e-12)


def test_one_real_digit_in_a_hundred_is_as_near_as_a_copy():
    real = real_digits()
    apart = cdist(real.pixels, real.pixels) + np.diag(np.full(1797, np.inf))
    assert (apart.min(1) < real.copy_distance).mean() == pytest.approx(0.01, abs=2e-3)


def test_copies_are_counted_with_noise_but_not_lighter_digits():
    real, noise = real_digits(), np.random.default_rng(0).normal(0, 1, (300, 64))
    pixels, labels = real.pixels[:300], real.labels[:300]
    exact, noisy, lighter = (score_digits(as_images(each), labels) for each in (pixels, pixels + noise, pixels * 0.75))
    assert exact.copies == 300 and noisy.copies >= 295 and lighter.copies == 0
    assert exact.accuracy > 0.99 and exact.precision == 1.0  # which alone would look like a perfect model


def test_mean_digits_are_read_right_and_have_no_variety():
    real = real_digits()
    labels = np.repeat(np.arange(10), 10)
    means = np.stack([real.pixels[real.labels == digit].mean(0) for digit in labels])
    found = score_digits(as_images(means), labels)
    assert found.accuracy == 1.0 and found.variety == 0.0 and found.recall == 0.0


def test_variety_is_the_distance_within_a_class_over_the_real():
    real = real_digits()
    rows = np.arange(1797) < 600
    found = score_digits(as_images(real.pixels[rows]), real.labels[rows]).variety
    shares = [
        pdist(real.pixels[rows & (real.labels == c)]).mean() / pdist(real.pixels[real.labels == c]).mean()
        for c in range(10)
    ]
    assert found == pytest.approx(np.mean(shares), rel=1e-2)  # images are rounded to bytes


def test_real_digits_score_as_real_ones():
    found = scores_of_real_digits(900)
    assert found.accuracy > 0.98 and found.precision == 1.0 and found.recall > 0.9
    assert found.variety == pytest.approx(1.0, abs=0.02) and found.frechet < 10
    assert found.copies == 900


def test_classifier_reads_97_percent_of_unseen_digits():
    real = real_digits()
    assert digits_accuracy(as_images(real.pixels[1200:]), real.labels[1200:]) == pytest.approx(0.97, abs=0.01)


def real_images(digits):
    """A real image of each of ``digits``, of those that the classifier was not fitted on."""
    found = read_digits()
    images = np.round(found.images * (255 / 16)).astype(np.uint8)[1200:, :, :, None]
    return np.stack([images[np.flatnonzero(found.labels[1200:] == digit)[n % 40]] for n, digit in enumerate(digits)])


def test_real_digits_are_read_as_asked():
    right = [DIGIT_OF[caption] for caption in PHRASINGS]
    found = score_captioned_digits(real_images(right), PHRASINGS)
    assert found.seen > 0.95 and found.unseen > 0.95 and found.images == 400
    wrong = [digit if n < 200 else (digit + 1) % 10 for n, digit in enumerate(right)]
    found = score_captioned_digits(real_images(wrong), PHRASINGS)
    assert found.seen > 0.95 and found.unseen < 0.05


def test_phrasings_ask_for_each_digit_equally():
    seen = {caption for digit in range(10) for caption in captions_of(digit, SEEN)}
    assert len(PHRASINGS) == 400 and [caption in seen for caption in PHRASINGS] == [True] * 200 + [False] * 200
    for kind in (PHRASINGS[:200], PHRASINGS[200:]):
        assert np.bincount([DIGIT_OF[caption] for caption in kind]).tolist() == [20] * 10
    assert set(PHRASINGS[200:]) == {caption for digit in range(10) for caption in captions_of(digit, UNSEEN)}


def test_caption_of_something_else_is_refused():
    with pytest.raises(DataError, match="a dog"):
        score_captioned_digits(real_images([1, 2]), ("the number 1", "a dog"))
