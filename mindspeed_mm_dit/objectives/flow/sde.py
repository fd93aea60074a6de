"""Solvers of dx = (v + D score) dt + sqrt(2 D) dB, which has the path's densities for any D (Ma et al. 2024, eq. 9)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindspeed_mm_dit.objectives.flow.path import DiffusionCoefficient, PathPoint
from mindspeed_mm_dit.objectives.flow.process import per_sample_factor

Tensor = Any
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


def heun(sde: Sde, x: Tensor, t: np.ndarray, h: float, noise: Tensor) -> Tensor:
    """Take one step: add noise, then follow the mean of the drifts at both ends (Karras et al. 2022, algorithm 2)."""
    x = sde.add_noise(x, t, h, noise)
    here = sde.drift(x, t)
    there = sde.drift(x + h * here, t + h)
    return x + 0.5 * h * (here + there)


Step = Callable[[Sde, Tensor, np.ndarray, float, Tensor], Tensor]


def integrate(step: Step, sde: Sde, x: Tensor, times: np.ndarray, noise_at: NoiseAt) -> Iterator[Tensor]:
    """Yield the state after each step of the grid ``times``, then after the last step, if there is one."""
    for number, (t, h) in enumerate(zip(times, np.diff(times))):
        x = step(sde, x, np.full(x.shape[0], t), float(h), noise_at(number))
        yield x
    if sde.diffusion.last_step is not None:
        yield sde.last(x, np.full(x.shape[0], times[-1]))
