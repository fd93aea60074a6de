"""Scores of drawn digits against scikit-learn's 1,797 real ones: read as asked, as varied, and no copies.

The feature space is fixed: the principal components of the real digits that hold 95 % of their variance (29 of 64), in
grey levels of 0 to 16. Nothing is trained, so the same images have the same scores everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from mindspeed_mm_dit.data.builtin import read_digits
from mindspeed_mm_dit.evaluation.metrics import frechet_distance, gaussian_of, precision_recall, squared_distances

FITTED_ON = 1200
VARIANCE_KEPT = 0.95
NEAREST_SHARE = 0.01
"""A sample is a copy where it is nearer to a real digit than this share of the real ones is to any other."""
FEWEST_IMAGES = 20
"""Two of a class, if the classes are equal: variety is between images of one class."""


@dataclass(frozen=True)
class RealDigits:
    """The real digits, and the features of any."""

    pixels: np.ndarray
    """(1797, 64) float64 in [0, 16]."""
    labels: np.ndarray
    """(1797,) int64."""
    components: np.ndarray
    """(64, features) float64, orthonormal columns."""
    copy_distance: float
    """Distance of pixels below which a sample is a copy."""

    def features(self, pixels: np.ndarray) -> np.ndarray:
        """Return the features (N, features) of ``pixels`` (N, 64) in [0, 16]."""
        return (pixels - self.pixels.mean(0)) @ self.components


@dataclass(frozen=True)
class DigitsScores:
    """How good drawn digits are."""

    accuracy: float
    """Share that a classifier of real digits reads as the digit that was asked for."""
    frechet: float
    """Frechet distance to the real digits in the feature space, in squared grey levels; it falls with the number of
    images, so it compares only with that of as many."""
    precision: float
    """Share of the samples among the real digits."""
    recall: float
    """Share of the real digits among the samples."""
    variety: float
    """Mean distance of two samples of a class over that of two real digits of it, mean over the classes."""
    copies: int
    """Samples that are a real digit, or nearly."""
    images: int
    """Samples that were scored."""

    @property
    def line(self) -> str:
        """Return what a run ends with."""
        return (
            f"digits score: {self.accuracy:.1%} of {self.images} samples are read as the digit that was asked for, "
            f"variety {self.variety:.0%} of real digits', copies of training pictures: {self.copies}"
        )


def digits_accuracy(images: np.ndarray, labels: np.ndarray) -> float:
    """Return the share of ``images`` (N, 8, 8, 1) uint8 that an SVM labels as ``labels`` (N,), in [0, 1].

    The classifier is scikit-learn's example for its digits, SVC(gamma=0.001), fitted on the first 1,200
    real ones; on the other 597 it is right 97 times in 100.
    """
    from sklearn.svm import SVC

    real = real_digits()
    classifier = SVC(gamma=0.001).fit(real.pixels[:FITTED_ON], real.labels[:FITTED_ON])
    return float(np.mean(classifier.predict(_pixels(images)) == labels))


def score_digits(images: np.ndarray, labels: np.ndarray) -> DigitsScores:
    """Score ``images`` (N, 8, 8, 1) uint8 drawn for ``labels`` (N,); N at least FEWEST_IMAGES."""
    real, pixels = real_digits(), _pixels(images)
    features, reference = real.features(pixels), real.features(real.pixels)
    found = precision_recall(features, reference)
    nearest = np.sqrt(squared_distances(pixels, real.pixels).min(axis=1))
    return DigitsScores(
        accuracy=digits_accuracy(images, labels),
        frechet=frechet_distance(gaussian_of(features), gaussian_of(reference)),
        precision=found.precision,
        recall=found.recall,
        variety=_variety(pixels, labels, real),
        copies=int((nearest < real.copy_distance).sum()),
        images=len(images),
    )


def scores_of_real_digits(count: int) -> DigitsScores:
    """Return the scores of ``count`` real digits (of all where there are fewer): what drawn ones can be held against.

    They are chosen evenly over the set. Each of them is a copy, of course, and precision is 1 for the same reason.
    """
    real = real_digits()
    chosen = np.unique(np.linspace(0, len(real.pixels) - 1, count).round().astype(int))
    images = np.round(real.pixels[chosen] * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
    return score_digits(images, real.labels[chosen])


@lru_cache(maxsize=1)
def real_digits() -> RealDigits:
    """Return scikit-learn's digits with their principal components."""
    digits = read_digits()
    pixels = digits.images.reshape(-1, 64)
    values, vectors = np.linalg.eigh(gaussian_of(pixels).covariance)
    shares = np.cumsum(values[::-1]) / values.sum()
    kept = int(np.searchsorted(shares, VARIANCE_KEPT)) + 1
    apart = squared_distances(pixels, pixels)
    np.fill_diagonal(apart, np.inf)
    nearest = np.sqrt(apart.min(axis=1))
    return RealDigits(pixels, digits.labels, vectors[:, ::-1][:, :kept], float(np.quantile(nearest, NEAREST_SHARE)))


def _pixels(images: np.ndarray) -> np.ndarray:
    """Images (N, 8, 8, 1) uint8 -> (N, 64) float64 in the digits' own grey levels, [0, 16]."""
    return images.reshape(len(images), -1).astype(np.float64) * (16 / 255)


def _variety(pixels: np.ndarray, labels: np.ndarray, real: RealDigits) -> float:
    shares = [
        _mean_distance(pixels[labels == digit]) / _mean_distance(real.pixels[real.labels == digit])
        for digit in range(10)
        if (labels == digit).sum() > 1
    ]
    return float(np.mean(shares)) if shares else float("nan")


def _mean_distance(points: np.ndarray) -> float:
    """Return the mean distance of two different rows of ``points``."""
    return float(np.sqrt(squared_distances(points, points)).sum() / (len(points) * (len(points) - 1)))
