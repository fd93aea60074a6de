"""Score images against real ones without a pretrained network: accuracy, variety and copies.

Features and classifier are fitted on the real images alone. For your own images they describe shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from einops import rearrange, reduce

from mindspeed_mm_dit.tools.evaluate.metrics import fit_gaussian, frechet_distance, precision_recall, squared_distances

CELLS = (4, 8)
"""Number of cells in height and width over which oriented gradients are averaged: coarse and fine shapes."""
DIRECTIONS = 8
PATCHES = 4
"""Patches in height and width that are shuffled."""
BLUR = 0.1
"""Standard deviation of the blur, as a fraction of the side."""
MAX_FITTED = 4_000
"""A small set is augmented by enlarging and mirroring, up to this number of images."""
MAX_CLASS_REPEATS = 6
NO_CLASS = -1
"""Label of an image that shows none of the classes."""


def shape_features(images: np.ndarray) -> np.ndarray:
    """Return locally normalised oriented gradients and coarse colours, (N, features), similar to HOG.

    images: (N, H, W, C) float64 in [0, 1].
    """
    return np.concatenate([_features(batch) for batch in np.array_split(images, len(images) // 256 + 1)])


def _features(images: np.ndarray) -> np.ndarray:
    from scipy import ndimage

    grey = images.mean(-1)
    down, right = (ndimage.correlate1d(grey, (-0.5, 0, 0.5), axis) for axis in (1, 2))
    turn = np.arctan2(down, right)[..., None] / np.pi * DIRECTIONS - np.arange(DIRECTIONS)
    near = np.maximum(0, 1 - abs((turn + DIRECTIONS / 2) % DIRECTIONS - DIRECTIONS / 2))
    edges = np.hypot(down, right)[..., None] * near  # (N, H, W, directions)
    features = [_in_cells(images, 2 * CELLS[0]) / 4]
    for across in CELLS:
        cells = _in_cells(edges, across)
        around = np.linalg.norm(ndimage.uniform_filter(cells, (0, 3, 3, 0)), axis=-1, keepdims=True)
        features.append(cells / (around + 0.02) / across)
    return np.concatenate([rearrange(part, "n h w c -> n (h w c)") for part in features], 1)


def _in_cells(values: np.ndarray, across: int) -> np.ndarray:
    """Return means of ``values`` (N, H, W, C) in about ``across`` cells in height and width."""
    return reduce(_in_patches(values, across), "n h w a b c -> n h w c", "mean")


def _in_patches(values: np.ndarray, across: int) -> np.ndarray:
    """Return about ``across`` patches in height and width, (N, h, w, a, b, C), without what is left at the end."""
    a, b = (max(1, side // across) for side in values.shape[1:3])
    height, width = (side // patch * patch for side, patch in zip(values.shape[1:3], (a, b)))
    return rearrange(values[:, :height, :width], "n (h a) (w b) c -> n h w a b c", a=a, b=b)


def _shuffled(images: np.ndarray, rng: np.random.Generator, across: int = PATCHES) -> np.ndarray:
    patches = _in_patches(images, across)
    (n, h, w), flat = patches.shape[:3], rearrange(patches, "n h w a b c -> n (h w) a b c")
    order = rng.permuted(np.broadcast_to(np.arange(h * w), (n, h * w)), axis=1)[..., None, None, None]
    mixed = rearrange(np.take_along_axis(flat, order, axis=1), "n (h w) a b c -> n (h a) (w b) c", h=h)
    result = images.copy()
    result[:, : mixed.shape[1], : mixed.shape[2]] = mixed
    return result


def _blurred(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    from scipy import ndimage

    return ndimage.gaussian_filter(images, (0, BLUR * images.shape[1], BLUR * images.shape[2], 0))


def _noise(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return _shuffled(images, rng, max(images.shape[1:3]))


def _misplaced(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    coarse = _blurred(images, rng)
    return np.clip(coarse + _shuffled(images - coarse, rng, 2 * PATCHES), 0, 1)


DESTROYED: dict[str, Callable[[np.ndarray, np.random.Generator], np.ndarray]] = {
    "patches shuffled": _shuffled,
    "blurred": _blurred,
    "noise of the same colours": _noise,
    "details misplaced": _misplaced,
}
"""Corruptions: (images (N, H, W, C), generator) -> as many images. The last looks like samples early in training."""


def fit_classifier(images: np.ndarray, labels: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Fit a classifier: images (n, H, W, C) -> labels (n,), NOTHING for what looks like a destroyed image."""
    from sklearn.decomposition import PCA
    from sklearn.pipeline import make_pipeline
    from sklearn.svm import SVC

    rng, repeats = np.random.default_rng(0), min(MAX_CLASS_REPEATS, max(1, MAX_FITTED // len(images)))
    mirrored = images[:, :, ::-1]
    variants = [images, mirrored, *(_enlarged((images, mirrored)[repeat % 2], rng) for repeat in range(2, repeats))]
    repeated, each = np.repeat(images, repeats, axis=0), len(DESTROYED)
    destroyed = [destroy(repeated[n::each], rng) for n, destroy in enumerate(DESTROYED.values())]
    targets = np.concatenate([np.tile(labels, repeats), np.full(len(repeated), NO_CLASS)])
    classifier: Any = make_pipeline(PCA(0.8), SVC(C=10.0, class_weight="balanced"))
    classifier.fit(shape_features(np.concatenate([*variants[:repeats], *destroyed])), targets)
    return lambda inputs: classifier.predict(shape_features(inputs))


def _enlarged(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Crop a random part of each image, 80 to 95 % of its sides, and scale it to the original size."""
    from scipy import ndimage

    size = np.array(images.shape[1:3])
    enlarged = []
    for image in images:
        part = np.ceil(size * rng.uniform(0.8, 0.95)).astype(int)
        top, left = rng.integers(size - part + 1)
        enlarged.append(ndimage.zoom(image[top : top + part[0], left : left + part[1]], (*size / part, 1), order=1))
    return np.stack(enlarged)


PCA_VARIANCE = 0.95
COPY_QUANTILE = 0.01
"""A sample is a copy if it is nearer to a real image than this fraction of the real images is to any other."""
MIN_IMAGES = 20
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
        return cls.with_classifier(images, labels, reference, fit_classifier(images[reference], labels[reference]))

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
        """Score ``pixels`` (n, ...) of images sampled for ``labels`` (n,), n at least MIN_IMAGES."""
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
            frechet=frechet_distance(fit_gaussian(features), fit_gaussian(reference)),
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
