"""Solvers of dx/dt = v(x, t) as generators of states: on a fixed grid, or with step sizes chosen per sample.

A velocity takes a whole batch with a time for each sample, so no result depends on the batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mindspeed_mm_dit.framework import ops
from mindspeed_mm_dit.objectives.flow.process import per_sample_factor

Tensor = Any
Velocity = Callable[[Tensor, np.ndarray], Tensor]
"""(x (B, ...), times (B,) float64) -> dx/dt (B, ...) float32."""


def euler(velocity: Velocity, x: Tensor, t: np.ndarray, h: float) -> Tensor:
    """Take one step of first order: x + h v(x, t)."""
    return x + h * velocity(x, t)


def heun(velocity: Velocity, x: Tensor, t: np.ndarray, h: float) -> Tensor:
    """Take one step of second order: the mean of the slopes at both ends (Ascher & Petzold 1998, section 4.2)."""
    here = velocity(x, t)
    there = velocity(x + h * here, t + h)
    return x + 0.5 * h * (here + there)


Step = Callable[[Velocity, Tensor, np.ndarray, float], Tensor]


def integrate(
    step: Step, velocity: Velocity, x: Tensor, times: np.ndarray, last: Step | None = None
) -> Iterator[Tensor]:
    """Yield the state after each step of the grid ``times``, which may rise or fall.

    last: the kind of the last step, if it differs.
    """
    for number, (t, h) in enumerate(zip(times, np.diff(times))):
        if last is not None and number == len(times) - 2:
            step = last
        x = step(velocity, x, np.full(x.shape[0], t), float(h))
        yield x


# Dormand & Prince 1980, table 2: nodes, the weights of the stages, and fifth minus fourth order.
_NODES = (1 / 5, 3 / 10, 4 / 5, 8 / 9, 1.0, 1.0)
_STAGES = (
    (1 / 5,),
    (3 / 40, 9 / 40),
    (44 / 45, -56 / 15, 32 / 9),
    (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
    (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
    (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
)
_ERROR = (71 / 57600, 0.0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40)
_SHRINK, _GROW, _SAFETY = 0.2, 5.0, 0.9
"""Bounds on the change of the step size, and its safety factor (Hairer, Norsett & Wanner 1993, II.4)."""
FIRST_STEP = 0.02
"""First step as a fraction of the whole interval; afterwards the error decides."""


def dopri5(
    velocity: Velocity, x: Tensor, times: np.ndarray, rtol: float = 1e-3, atol: float = 1e-6
) -> Iterator[Tensor]:
    """Yield the state at each of the rising ``times`` but the first, with steps of fifth order (Dormand & Prince 1980).

    Step sizes are chosen per sample: the difference from fourth order, as root mean square over the sample, stays below
    atol + rtol * that of the state.
    """
    t = np.full(x.shape[0], times[0])
    h = np.full(x.shape[0], FIRST_STEP * (times[-1] - times[0]))
    slope = velocity(x, t)
    for end in times[1:]:
        while (t < end).any():
            step = np.minimum(h, end - t)
            reached, slopes = _stages(velocity, x, t, step, slope)
            error = step * _rms(_combined(_ERROR, slopes)) / (atol + rtol * np.maximum(_rms(x), _rms(reached)))
            accepted = ~(error > 1)  # (a sample that is not finite continues to the end, as with other solvers)
            x, slope = _chosen(accepted, reached, x), _chosen(accepted, slopes[-1], slope)
            t = np.where(accepted, np.where(step == end - t, end, t + step), t)
            proposed = step * np.clip(_SAFETY * np.fmax(error, 1e-10) ** -0.2, _SHRINK, _GROW)
            # A step cut short by ``end`` must not shrink the next one.
            h = np.where(accepted & (step < h), np.maximum(h, proposed), proposed)
        yield x


def _stages(velocity: Velocity, x: Tensor, t: np.ndarray, h: np.ndarray, slope: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the state after a step of ``h`` (B,), and the slopes of all stages; the last is the slope there."""
    slopes, reached = [slope], x
    for node, weights in zip(_NODES, _STAGES):
        reached = x + per_sample_factor(h, x) * _combined(weights, slopes)
        slopes.append(velocity(reached, t + node * h))
    return reached, slopes


def _combined(weights: tuple[float, ...], slopes: list[Tensor]) -> Tensor:
    return sum(weight * slope for weight, slope in zip(weights, slopes) if weight)


def _rms(x: Tensor) -> np.ndarray:
    return np.sqrt(ops.numpy(ops.mean_per_sample(x * x)).astype(np.float64))


def _chosen(good: np.ndarray, x: Tensor, y: Tensor) -> Tensor:
    return ops.where(ops.tensor(good.reshape(-1, *(1 for _ in x.shape[1:]))), x, y)
