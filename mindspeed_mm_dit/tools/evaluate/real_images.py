"""Score images against real ones without a pretrained network: accuracy, variety and copies.

Features and classifier are fitted on the real images alone. For your own images they describe shapes (``shapes.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindspeed_mm_dit.tools.evaluate.metrics import frechet_distance, gaussian_of, precision_recall, squared_distances
from mindspeed_mm_dit.tools.evaluate.shapes import DESTROYED, fit_classifier, shape_features

PCA_VARIANCE = 0.95
COPY_QUANTILE = 0.01
"""A sample is a copy if it is nearer to a real image than this fraction of the real images is to any other."""
FEWEST_IMAGES = 20
"""Minimum number of images to score: variety is measured between images of one class."""
HELD_OUT = 3
"""Every n-th image of a class is held out from the classifier, to measure its accuracy."""


@dataclass(frozen=True)
class Scores:
    """How good generated images are."""

    accuracy: float | None
    """Fraction that a classifier of real images classifies as requested."""
    frechet: float
    """Frechet distance to the real images in the feature space. It falls with the number of images, so compare only
    sets of equal size."""
    precision: float | None
    """Fraction of the samples among the real images."""
    recall: float | None
    """Fraction of the real images among the samples."""
    variety: float
    """Mean distance of two samples of a class, divided by that of two real images of it; mean over the classes."""
    copies: int
    """Number of samples that are a real image, or nearly."""


@dataclass(frozen=True)
class RealImages:
    """Real images, with the feature space and the classifier that other images are scored by."""

    pixels: np.ndarray
    """(N, D) float64, or (N, H, W, C) in [0, 1], for which mirrored copies count too."""
    labels: np.ndarray
    """(N,) int64."""
    reference: np.ndarray
    """(N,) bool: those that samples are compared with; the others are held out."""
    space: Any
    """scikit-learn's principal components of the reference: of its pixels, or of its shapes."""
    reads: Callable[[np.ndarray], np.ndarray]
    """The classifier: pixels (n, ...) -> labels (n,), or shapes.NOTHING if it recognises no class."""
    copy_distance: float
    """Distance in pixel space below which a sample is a copy."""

    @classmethod
    def of(cls, images: np.ndarray, labels: np.ndarray) -> RealImages:
        """Hold out every third image (H, W, C) of each class; fit components and classifier on the others' shapes."""
        reference = ~held_out(labels)
        reads = fit_classifier(images[reference], labels[reference])
        return cls.with_classifier(images, labels, reference, reads)

    @classmethod
    def with_classifier(
        cls, pixels: np.ndarray, labels: np.ndarray, reference: np.ndarray, reads: Callable[[Any], Any]
    ) -> RealImages:
        """Fit the principal components, and measure the distances between real images."""
        from sklearn.decomposition import PCA

        space = PCA(PCA_VARIANCE, svd_solver="covariance_eigh").fit(_described(pixels[reference]))
        apart = squared_distances(_flat(pixels), _flat(pixels))
        np.fill_diagonal(apart, np.inf)
        nearest = np.sqrt(apart.min(axis=1))
        return cls(pixels, labels, reference, space, reads, float(np.quantile(nearest, COPY_QUANTILE)))

    def features(self, pixels: np.ndarray) -> np.ndarray:
        """Return the features (N, features) of ``pixels`` (N, ...)."""
        return self.space.transform(_described(pixels))

    def score(self, pixels: np.ndarray, labels: np.ndarray) -> Scores:
        """Score ``pixels`` (n, ...) of images sampled for ``labels`` (n,), n at least FEWEST_IMAGES."""
        return self._score(pixels, labels, self.pixels)

    def score_held_out(self) -> Scores:
        """Score the held-out real images against the others, as a baseline for generated ones."""
        return self._score(self.pixels[~self.reference], self.labels[~self.reference], self.pixels[self.reference])

    def score_destroyed(self) -> dict[str, Scores]:
        """Score the held-out real images under each corruption that destroys shapes: they should score badly."""
        images, labels, rng = self.pixels[~self.reference], self.labels[~self.reference], np.random.default_rng(1)
        return {name: self._score(destroy(images, rng), labels, self.pixels[:1]) for name, destroy in DESTROYED.items()}

    def _score(self, pixels: np.ndarray, labels: np.ndarray, originals: np.ndarray) -> Scores:
        """Score images that may be copies of ``originals`` (m, ...)."""
        features, reference = self.features(pixels), self.features(self.pixels[self.reference])
        overlap = precision_recall(features, reference)
        if originals.ndim > 2:
            originals = np.concatenate([originals, originals[:, :, ::-1]])
        nearest = np.sqrt(squared_distances(_flat(pixels), _flat(originals)).min(axis=1))
        return Scores(
            accuracy=float(np.mean(self.reads(pixels) == labels)),
            frechet=frechet_distance(gaussian_of(features), gaussian_of(reference)),
            precision=overlap.precision,
            recall=overlap.recall,
            variety=self._variety(pixels, labels),
            copies=int((nearest < self.copy_distance).sum()),
        )

    def _variety(self, pixels: np.ndarray, labels: np.ndarray) -> float:
        ratios = []
        for label in np.unique(labels):
            samples, real = _flat(pixels[labels == label]), _flat(self.pixels[self.labels == label])
            if len(samples) > 1 and len(real) > 1 and (apart := _mean_distance(real)):
                ratios.append(_mean_distance(samples) / apart)
        return float(np.mean(ratios)) if ratios else float("nan")


def held_out(labels: np.ndarray) -> np.ndarray:
    """Return which images are held out, (N,) bool: every third of each class, in their order."""
    chosen = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        chosen[np.flatnonzero(labels == label)[HELD_OUT - 1 :: HELD_OUT]] = True
    return chosen


def _described(pixels: np.ndarray) -> np.ndarray:
    """Return the inputs of the principal components: shape features of images (N, H, W, C), or pixels (N, D)."""
    return pixels if pixels.ndim == 2 else shape_features(pixels)


def _flat(pixels: np.ndarray) -> np.ndarray:
    return pixels.reshape(len(pixels), -1)


def _mean_distance(points: np.ndarray) -> float:
    """Return the mean distance of two different rows of ``points``."""
    return float(np.sqrt(squared_distances(points, points)).sum() / (len(points) * (len(points) - 1)))
