"""Distances between two sets of images by their features: arithmetic only, in float64, with NumPy.

The definitions are those of ADM's evaluator (Dhariwal & Nichol 2021). Features are (N, D), one row per image.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

SPLIT_IMAGES = 5000
"""Number of images in a split of the Inception Score."""
NEIGHBOURS = 3
"""A ball around a feature reaches to its k-th neighbour, where k is this number."""
BLOCK_ROWS = 2048
"""Rows compared at a time: a block of distances takes 32 MiB."""
_SAME_POINT = 1e-12
"""Squared distances below this fraction of the squared norms are rounding: the points are equal."""


@dataclass(frozen=True)
class Gaussian:
    """Mean and covariance of a set of features."""

    mean: np.ndarray
    """(D,) float64."""
    covariance: np.ndarray
    """(D, D) float64, over N - 1."""
    features: np.ndarray | None = None
    """(N, D), the set itself if N is below D: no eigenvectors are needed then."""

    @property
    def factor(self) -> np.ndarray:
        """F with F F^T = the covariance, (D, N) or (D, rank); eigenvalues that are rounding count as 0."""
        if self.features is not None:
            return (self.features - self.mean).T / np.sqrt(len(self.features) - 1)
        values, vectors = np.linalg.eigh(self.covariance)
        significant = values > values[-1] * len(values) * np.finfo(np.float64).eps
        return np.asarray(vectors[:, significant] * np.sqrt(values[significant]))


@dataclass(frozen=True)
class PrecisionRecall:
    """Improved precision and recall (Kynkaanniemi et al. 2019), both in [0, 1]."""

    precision: float
    """Fraction of the samples that lie in a ball of the reference."""
    recall: float
    """Fraction of the reference that lies in a ball of the samples."""


def fit_gaussian(features: np.ndarray) -> Gaussian:
    """Return mean and covariance of ``features`` (N, D), N at least 2."""
    mean = features.mean(axis=0, dtype=np.float64)
    covariance = np.zeros((len(mean), len(mean)))
    for rows in _blocks(features):
        centred = rows - mean
        covariance += centred.T @ centred
    return Gaussian(mean, covariance / (len(features) - 1), features if len(features) < len(mean) else None)


def frechet_distance(a: Gaussian, b: Gaussian) -> float:
    """Return the squared 2-Wasserstein distance of two Gaussians, the "FID" of Heusel et al. 2017 (eq. 6).

    With A = F F^T and B = G G^T the trace of (A B)^(1/2) is the sum of the singular values of F^T G. This avoids
    the root of a matrix, which some builds of LAPACK get wrong if the matrix is singular.
    """
    cross = np.linalg.svd(a.factor.T @ b.factor, compute_uv=False).sum()
    apart = a.mean - b.mean
    return float(max(apart @ apart + np.trace(a.covariance) + np.trace(b.covariance) - 2 * cross, 0.0))


def inception_score(logits: np.ndarray, split_images: int = SPLIT_IMAGES) -> float:
    """Return the Inception Score (Salimans et al. 2016) of ``logits`` (N, classes): the mean over the splits.

    A split is ``split_images`` images in order, the last one the rest, as in ADM's evaluator.
    """
    splits = [logits[start : start + split_images] for start in range(0, len(logits), split_images)]
    return float(np.mean([_score_of_split(split.astype(np.float64)) for split in splits]))


def precision_recall(samples: np.ndarray, reference: np.ndarray, neighbours: int = NEIGHBOURS) -> PrecisionRecall:
    """Compare ``samples`` (N, D) with ``reference`` (M, D), block by block; N and M must exceed ``neighbours``."""
    return PrecisionRecall(
        precision=float(_inside(samples, reference, _radii(reference, neighbours)).mean()),
        recall=float(_inside(reference, samples, _radii(samples, neighbours)).mean()),
    )


def squared_distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return |a - b|^2 of every row of ``a`` (N, D) to every row of ``b`` (M, D): (N, M) float64."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    norms = np.square(a).sum(1)[:, None] + np.square(b).sum(1)
    squared = norms - 2 * (a @ b.T)
    squared[squared < _SAME_POINT * norms] = 0.0
    return squared


def _score_of_split(logits: np.ndarray) -> float:
    """Return exp(mean KL(p(y|x) || p(y))); the logarithms are taken before anything can round to 0."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    p = np.exp(log_p)
    marginal = p.mean(axis=0)
    log_marginal = np.log(np.where(marginal > 0, marginal, 1.0))  # (a class without probability adds nothing)
    return float(np.exp((p * (log_p - log_marginal)).sum(axis=1).mean()))


def _radii(features: np.ndarray, neighbours: int) -> np.ndarray:
    """Return for each row the squared distance to its ``neighbours``-th nearest other row, (N,)."""
    radii = []
    for rows in _blocks(features):
        nearest = np.empty((len(rows), 0))
        for columns in _blocks(features):
            nearest = np.concatenate([nearest, squared_distances(rows, columns)], axis=1)
            nearest = np.partition(nearest, neighbours, axis=1)[:, : neighbours + 1]  # itself is one of them
        radii.append(nearest.max(axis=1))
    return np.concatenate(radii)


def _inside(points: np.ndarray, centres: np.ndarray, radii: np.ndarray) -> np.ndarray:
    """Return whether each of ``points`` (N, D) lies in a ball of ``radii`` (M,), squared, around ``centres`` (M, D)."""
    inside = []
    for rows in _blocks(points):
        hit = np.zeros(len(rows), bool)
        for number, columns in enumerate(_blocks(centres)):
            reach = radii[number * BLOCK_ROWS :][: len(columns)]
            hit |= (squared_distances(rows, columns) <= reach).any(axis=1)
        inside.append(hit)
    return np.concatenate(inside)


def _blocks(features: np.ndarray) -> Iterator[np.ndarray]:
    return (features[start : start + BLOCK_ROWS] for start in range(0, len(features), BLOCK_ROWS))
