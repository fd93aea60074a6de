"""Score generated digits against scikit-learn's 1,797 real ones: accuracy, variety and copies.

The feature space is fixed: the principal components of the real digits that hold 95 % of their variance (29 of 64), in
grey levels of 0 to 16. The classifier is that of scikit-learn's example for its digits, SVC(gamma=0.001), fitted on the
first 1,200 real ones; its accuracy on the other 597 is 97 %.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from mindspeed_mm_dit.tools.evaluate.demo.digits import OFFSET_STEP, read_digits
from mindspeed_mm_dit.tools.evaluate.real_images import RealImages, Scores

FITTED_ON = 1200


def score_line(images: np.ndarray, labels: np.ndarray) -> str:
    """Return the last line of a run: the scores of ``images`` (N, 8, 8, 1) uint8 sampled for ``labels`` (N,)."""
    scores = score_digits(images, labels)
    return (
        f"digits score: {scores.accuracy:.1%} of {len(images)} samples are classified as the requested digit, "
        f"variety {scores.variety:.0%} of real digits', copies of training images: {scores.copies}"
    )


def cut_out(images: np.ndarray) -> np.ndarray:
    """Return the 8 x 8 pixels with most ink of images (N, H, W, 1) uint8, among the possible offsets of a digit."""
    squares = np.lib.stride_tricks.sliding_window_view(images, (1, 8, 8, 1))[:, ::OFFSET_STEP, ::OFFSET_STEP]
    squares = squares.reshape(len(images), -1, 8, 8, 1)
    return squares[np.arange(len(images)), squares.sum((2, 3, 4), dtype=np.int64).argmax(1)]


def digits_accuracy(images: np.ndarray, labels: np.ndarray) -> float:
    """Return the fraction of ``images`` (N, 8, 8, 1) uint8 that the classifier labels as ``labels`` (N,)."""
    reads = real_digits().reads
    assert reads is not None
    return float(np.mean(reads(pixels_of(images)) == labels))


def score_digits(images: np.ndarray, labels: np.ndarray) -> Scores:
    """Score ``images`` (N, 8, 8, 1) uint8 sampled for ``labels`` (N,); N at least FEWEST_IMAGES."""
    return real_digits().score(pixels_of(images), labels)


def scores_of_real_digits(count: int) -> Scores:
    """Return the scores of ``count`` real digits, or of all if there are fewer, as a baseline for generated ones.

    They are chosen evenly over the set. All of them count as copies, and precision is 1 for the same reason.
    """
    real = real_digits()
    chosen = np.unique(np.linspace(0, len(real.pixels) - 1, count).round().astype(int))
    images = np.round(real.pixels[chosen] * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
    return score_digits(images, real.labels[chosen])


@lru_cache(maxsize=1)
def real_digits() -> RealImages:
    """Return scikit-learn's digits with their principal components."""
    from sklearn.svm import SVC

    digits = read_digits()
    pixels, everyone = digits.images.reshape(-1, 64), np.ones(len(digits.labels), bool)
    classifier = SVC(gamma=0.001).fit(pixels[:FITTED_ON], digits.labels[:FITTED_ON])
    return RealImages.with_classifier(pixels, digits.labels, everyone, classifier.predict)


def pixels_of(images: np.ndarray) -> np.ndarray:
    """Return images (N, 8, 8, 1) uint8 as (N, 64) float64 in the data set's grey levels, [0, 16]."""
    return images.reshape(len(images), -1).astype(np.float64) * (16 / 255)
