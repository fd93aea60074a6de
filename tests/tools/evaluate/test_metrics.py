from dataclasses import replace

import numpy as np
import pytest
from scipy.linalg import sqrtm
from scipy.spatial.distance import cdist
from scipy.stats import entropy

from mindspeed_mm_dit.tools.evaluate import metrics
from mindspeed_mm_dit.tools.evaluate.metrics import Gaussian, fit_gaussian, frechet_distance, precision_recall


def features():
    """Two sets of features that overlap in part, (400, 24) and (300, 24) float32."""
    draw = np.random.Generator(np.random.Philox(7))
    mixing = draw.standard_normal((24, 24)) / 5
    samples = draw.standard_normal((400, 24)) @ mixing + 0.1
    return samples.astype(np.float32), (draw.standard_normal((300, 24)) @ mixing * 1.2).astype(np.float32)


def test_scores_are_those_of_torch_fidelity():
    """What torch-fidelity 0.4.0 makes of ``features()`` with functions of its own: splits of 100, not shuffled."""
    samples, reference = features()
    found = precision_recall(samples, reference)
    distance, score = (
        frechet_distance(*map(fit_gaussian, (samples, reference))),
        metrics.inception_score(samples * 3, 100),
    )
    expected = (1.883900054994598, 5.276922035648468, 0.949999988079071, 0.5933333039283752)
    assert (distance, score, found.precision, found.recall) == pytest.approx(expected, rel=1e-6)


def test_mean_and_covariance_are_those_of_numpy(monkeypatch):
    monkeypatch.setattr(metrics, "BLOCK_ROWS", 7)
    samples = features()[0]
    found = fit_gaussian(samples)
    np.testing.assert_allclose(found.mean, samples.astype(np.float64).mean(0), rtol=1e-12)
    np.testing.assert_allclose(found.covariance, np.cov(samples.astype(np.float64), rowvar=False), rtol=1e-9)


def test_frechet_distance_is_that_of_a_matrix_square_root():
    a, b = map(fit_gaussian, features())
    cross = np.trace(sqrtm(a.covariance @ b.covariance).real)
    apart = a.mean - b.mean
    expected = apart @ apart + np.trace(a.covariance) + np.trace(b.covariance) - 2 * cross
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-9)
    a, b = np.array([4.0, 9.0, 0.0]), np.array([1.0, 0.0, 0.0])  # diagonal and singular: in closed form
    there, here = Gaussian(np.array([1.0, 2.0, 2.0]), np.diag(a)), Gaussian(np.zeros(3), np.diag(b))
    assert frechet_distance(there, here) == pytest.approx(9 + (2 - 1) ** 2 + 9, abs=1e-12)


def test_frechet_distance_of_a_set_from_itself_is_0():
    few = np.random.default_rng(0).standard_normal((20, 200))
    assert frechet_distance(fit_gaussian(few), fit_gaussian(few)) < 1e-10 * 200
    shifted = frechet_distance(fit_gaussian(few), fit_gaussian(few + 0.5))
    assert shifted == pytest.approx(0.25 * 200, rel=1e-9)  # the means alone differ
    few, other = (fit_gaussian(np.random.default_rng(seed).standard_normal((20, 200)) + seed) for seed in (0, 1))
    by_eigenvectors = frechet_distance(replace(few, features=None), replace(other, features=None))
    assert frechet_distance(few, other) == pytest.approx(by_eigenvectors, rel=1e-9)
    assert frechet_distance(few, replace(few, features=None)) < 1e-10 * 200


def test_inception_score_of_certain_uniform_and_split_predictions():
    assert metrics.inception_score(1e3 * np.eye(10)) == pytest.approx(10, rel=1e-12)
    assert metrics.inception_score(np.zeros((50, 10))) == pytest.approx(1, rel=1e-12)
    far = np.array([[5000.0], [0.0], [-5000.0]])  # which no probability depends on
    assert metrics.inception_score(1e3 * np.eye(3) + far) == pytest.approx(3, rel=1e-12)
    logits = features()[0][:70].astype(np.float64)
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    splits = [p[:30], p[30:60], p[60:]]
    expected = np.mean([np.exp(np.mean([entropy(row, part.mean(0)) for row in part])) for part in splits])
    assert metrics.inception_score(logits, 30) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("rows", [7, 2048])
def test_precision_and_recall_do_not_depend_on_the_blocks(monkeypatch, rows):
    monkeypatch.setattr(metrics, "BLOCK_ROWS", rows)
    samples, reference = features()
    found = precision_recall(samples, reference)
    a, b = samples.astype(np.float64), reference.astype(np.float64)

    def share(points, centres):
        radii = np.sort(cdist(centres, centres), axis=1)[:, 3]
        return np.mean([(cdist(point[None], centres)[0] <= radii).any() for point in points])

    assert (found.precision, found.recall) == (share(a, b), share(b, a))
    assert 0.05 < found.precision < 0.97 and 0.05 < found.recall < 0.95  # (a test that could not fail says nothing)


def test_precision_and_recall_of_equal_sets_and_of_one_mode():
    points = np.repeat(features()[0][:40] * 100, 5, axis=0)
    found = precision_recall(points, points[::-1])
    assert (found.precision, found.recall) == (1.0, 1.0)
    reference = np.concatenate([features()[1], features()[1] + 100])
    found = precision_recall(features()[1] + 1e-3, reference)
    assert found.precision > 0.99 and 0.49 < found.recall <= 0.5
