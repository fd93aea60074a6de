"""UniPC of second order for a straight path: a multistep solver that corrects each step with the next network output.

Zhao et al. 2023, algorithms 1 and 2 with B(h) = exp(h) - 1 and prediction of data, as in diffusers' Wan pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

Tensor = Any
DataAt = Callable[[Tensor, float], Tensor]
"""(x (B, ...), sigma) -> the data (B, ...) that the network predicts from x."""


class TrajectoryPoint(NamedTuple):
    """A point of the trajectory."""

    x: Tensor
    """The state, corrected."""
    data: Tensor
    """The data predicted there, before the state was corrected."""
    half_log_snr: float
    """lambda = log((1 - sigma) / sigma)."""


def unipc(data_at: DataAt, x: Tensor, sigmas: np.ndarray) -> Iterator[Tensor]:
    """Yield the state at each of the falling ``sigmas`` (steps + 1,) but the first; the last is 0, the first below 1.

    One network call per step. The first and the last step are of first order.
    """
    last = len(sigmas) - 2
    points: list[TrajectoryPoint] = []
    for step, (sigma, following) in enumerate(pairwise(sigmas.tolist())):
        data = data_at(x, sigma)
        if step:
            x = _corrected(points, data, sigmas[step - 1].item(), sigma)
        points = [*points[-1:], TrajectoryPoint(x, data, _half_log_snr(sigma))]
        x = _predicted(points if step < last else points[-1:], sigma, following)
        yield x


def _predicted(points: list[TrajectoryPoint], sigma: float, following: float) -> Tensor:
    """Step from the last of ``points``, at ``sigma``, to ``following`` (algorithm 2)."""
    here = points[-1]
    h = _half_log_snr(following) - here.half_log_snr
    towards = here.data
    if len(points) > 1:
        towards = towards + 0.5 * _slope(points, h)
    return _solve(here.x, towards, h, sigma, following)


def _corrected(points: list[TrajectoryPoint], data: Tensor, sigma: float, reached: float) -> Tensor:
    """Redo the last step with the ``data`` predicted at its end (algorithm 1)."""
    here = points[-1]
    h = _half_log_snr(reached) - here.half_log_snr
    if len(points) == 1:
        return _solve(here.x, here.data + 0.5 * (data - here.data), h, sigma, reached)
    first, second = _weights(h, (points[0].half_log_snr - here.half_log_snr) / h)
    towards = here.data + first * _slope(points, h) + second * (data - here.data)
    return _solve(here.x, towards, h, sigma, reached)


def _solve(x: Tensor, data: Tensor, h: float, sigma: float, reached: float) -> Tensor:
    """Solve from ``sigma`` to ``reached`` for constant data (eq. 3)."""
    return reached / sigma * x - (1 - reached) * math.expm1(-h) * data


def _slope(points: list[TrajectoryPoint], h: float) -> Tensor:
    """Return the change of the data over a step of ``h``, from the last two ``points``."""
    before, here = points
    return h / (before.half_log_snr - here.half_log_snr) * (before.data - here.data)


def _weights(h: float, ratio: float) -> list[float]:
    """Solve the conditions of second order (eq. 11) for the differences at ``ratio`` and 1 steps from here."""
    growth = math.expm1(-h)
    phi_2 = growth / -h - 1
    phi_3 = phi_2 / -h - 0.5
    return np.linalg.solve([[1.0, 1.0], [ratio, 1.0]], [phi_2 / growth, 2 * phi_3 / growth]).tolist()


def _half_log_snr(sigma: float) -> float:
    return math.log((1 - sigma) / sigma) if sigma > 0 else math.inf
