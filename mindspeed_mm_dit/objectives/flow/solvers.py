"""Solvers of a path's equations as generators of states: the ODE dx/dt = v(x, t), on a fixed grid or with step sizes
chosen per sample, and the SDE dx = (v + D score) dt + sqrt(2 D) dB, on a fixed grid.

The SDE has the path's densities for any D (Ma et al. 2024, eq. 9). A velocity takes a whole batch with a time for each
sample, so no result depends on the batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindspeed_mm_dit.framework import ops
from mindspeed_mm_dit.objectives.flow.path import DiffusionCoefficient, PathPoint
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


Fields = Callable[[Tensor, np.ndarray], tuple[Tensor, Tensor]]
"""(x (B, ...), times (B,) float64) -> (velocity, score), each (B, ...) float32."""
NoiseAt = Callable[[int], Tensor]
"""Sampling step, counted from the start -> (B, ...) standard normal."""
Path = Callable[[np.ndarray], PathPoint]


@dataclass(frozen=True)
class Sde:
    """The SDE: a network's fields, their path, and the diffusion."""

    fields: Fields
    """Velocity and score from the network."""
    path: Path
    """The objective's path."""
    diffusion: DiffusionCoefficient
    """D and the last step."""

    def drift(self, x: Tensor, t: np.ndarray) -> Tensor:
        """Return v + D score at ``x`` and times ``t`` (B,)."""
        velocity, score = self.fields(x, t)
        return velocity + per_sample_factor(self.diffusion.at(t, self.path(t)), x) * score

    def add_noise(self, x: Tensor, t: np.ndarray, h: float, noise: Tensor) -> Tensor:
        """Return ``x`` plus the noise of a step of length ``h`` from times ``t`` (B,)."""
        return x + per_sample_factor(np.sqrt(2 * self.diffusion.at(t, self.path(t)) * h), x) * noise

    def last(self, x: Tensor, t: np.ndarray) -> Tensor:
        """Return the state after the last step from times ``t`` (B,), without noise."""
        kind, h = self.diffusion.last_step, self.diffusion.last_step_size
        if kind == "Mean":
            return x + h * self.drift(x, t)
        velocity, score = self.fields(x, t)
        if kind == "Euler":
            return x + h * velocity
        point = self.path(t)
        return per_sample_factor(1 / point.alpha, x) * x + per_sample_factor(point.sigma**2 / point.alpha, x) * score


def euler_maruyama(sde: Sde, x: Tensor, t: np.ndarray, h: float, noise: Tensor) -> Tensor:
    """Take one step of first order."""
    return sde.add_noise(x + h * sde.drift(x, t), t, h, noise)


def sde_heun(sde: Sde, x: Tensor, t: np.ndarray, h: float, noise: Tensor) -> Tensor:
    """Take one step: add noise, then follow the mean of the drifts at both ends (Karras et al. 2022, algorithm 2)."""
    x = sde.add_noise(x, t, h, noise)
    here = sde.drift(x, t)
    there = sde.drift(x + h * here, t + h)
    return x + 0.5 * h * (here + there)


SdeStep = Callable[[Sde, Tensor, np.ndarray, float, Tensor], Tensor]


def integrate_sde(step: SdeStep, sde: Sde, x: Tensor, times: np.ndarray, noise_at: NoiseAt) -> Iterator[Tensor]:
    """Yield the state after each step of the grid ``times``, then after the last step, if there is one."""
    for number, (t, h) in enumerate(zip(times, np.diff(times))):
        x = step(sde, x, np.full(x.shape[0], t), float(h), noise_at(number))
        yield x
    if sde.diffusion.last_step is not None:
        yield sde.last(x, np.full(x.shape[0], times[-1]))
