"""Shape features of images, and corruptions that destroy shapes but preserve colours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from einops import rearrange, reduce

CELLS = (4, 8)
"""Number of cells in height and width over which oriented gradients are averaged: coarse and fine shapes."""
DIRECTIONS = 8
PATCHES = 4
"""Patches in height and width that are shuffled."""
BLUR = 0.1
"""Standard deviation of the blur, as a fraction of the side."""
MOST_FITTED = 4_000
"""A small set is augmented by enlarging and mirroring, up to this number of images."""
MOST_REPEATS = 6
NOTHING = -1
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

    rng, repeats = np.random.default_rng(0), min(MOST_REPEATS, max(1, MOST_FITTED // len(images)))
    mirrored = images[:, :, ::-1]
    variants = [images, mirrored, *(_enlarged((images, mirrored)[repeat % 2], rng) for repeat in range(2, repeats))]
    repeated, each = np.repeat(images, repeats, axis=0), len(DESTROYED)
    destroyed = [destroy(repeated[n::each], rng) for n, destroy in enumerate(DESTROYED.values())]
    targets = np.concatenate([np.tile(labels, repeats), np.full(len(repeated), NOTHING)])
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
