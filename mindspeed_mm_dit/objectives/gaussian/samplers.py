"""Samplers as generators of states: DDPM (Ho et al. 2020), DDIM (Song et al. 2021), DPM-Solver++ (Lu et al. 2022).

Each is (diffusion, predict, x_T, noise_at, clip=) -> an iterator over the states; the last is x_0. To add one, write
such a function, and its line in ``objective``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mindspeed_mm_dit.framework import ops
from mindspeed_mm_dit.objectives.gaussian.process import GaussianDiffusion

Tensor = Any
Predict = Callable[[Tensor, Tensor, int], Tensor]
"""(x_t (B, C, ...), training timestep (B,), the same as an int) -> output (B, C or 2C, ...) float32."""
NoiseAt = Callable[[int], Tensor]
"""Sampling step, counted from the start -> (B, C, ...) standard normal."""


def ddpm(
    diffusion: GaussianDiffusion, predict: Predict, x: Tensor, noise_at: NoiseAt, clip: float | None = None
) -> Iterator[Tensor]:
    """Ancestral sampling (Ho et al. 2020, algorithm 2), with the network's variance if it is learned."""
    for step, index in enumerate(reversed(range(len(diffusion.schedule)))):
        t, output = _call_model(diffusion, predict, x, index)
        predicted = diffusion.predict(output, x, t, clip)
        x = predicted.mean
        if index > 0:
            x = x + ops.exp(0.5 * predicted.log_variance) * noise_at(step)
        yield x


def ddim(
    diffusion: GaussianDiffusion, predict: Predict, x: Tensor, noise_at: NoiseAt, clip: float | None = None
) -> Iterator[Tensor]:
    """Deterministic sampling (Song et al. 2021, eq. 12 with sigma = 0); ``noise_at`` is not used."""
    for index in reversed(range(len(diffusion.schedule))):
        t, output = _call_model(diffusion, predict, x, index)
        x_start = diffusion.predict(output, x, t, clip).x_start
        epsilon = diffusion.epsilon_from_x_start(x, t, x_start)
        signal = diffusion.at("alphas_cumprod_prev", t, x)
        x = x_start * signal**0.5 + (1 - signal) ** 0.5 * epsilon
        yield x


def dpm_solver_pp(
    diffusion: GaussianDiffusion, predict: Predict, x: Tensor, noise_at: NoiseAt, clip: float | None = None
) -> Iterator[Tensor]:
    """Deterministic, second order, one network call per step: DPM-Solver++(2M) (Lu et al. 2022, algorithm 2).

    The first and the last step are of first order: the first has no step before it, and the last ends without
    noise, where the half log-SNR is infinite. ``noise_at`` is not used.
    """
    x_before: Tensor = None
    h_before = 0.0
    for index in reversed(range(len(diffusion.schedule))):
        t, output = _call_model(diffusion, predict, x, index)
        x_start = diffusion.predict(output, x, t, clip).x_start
        keep, gain, h = diffusion.schedule.solution_weights(index)
        slope = 0.0 if x_before is None or index == 0 else 0.5 * h / h_before
        towards = x_start if slope == 0.0 else (1 + slope) * x_start - slope * x_before
        x = keep * x + gain * towards
        x_before, h_before = x_start, h
        yield x


def _call_model(diffusion: GaussianDiffusion, predict: Predict, x: Tensor, index: int) -> tuple[Tensor, Tensor]:
    """Return (index into the schedule, network output) for a whole batch at one sampling step."""
    timestep = int(diffusion.schedule.timestep_map[index])
    t_index, t_network = (ops.tensor(np.full(x.shape[0], value, np.int64)) for value in (index, timestep))
    return t_index, ops.to_float32(predict(x, t_network, timestep))
