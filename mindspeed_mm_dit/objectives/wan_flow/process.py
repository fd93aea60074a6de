"""Wan's flow matching on tensors: noising, the loss, Euler as in MindSpeed-MM, and UniPC as in diffusers.

UniPC (Zhao et al. 2023), here of second order, corrects each step with the next output of the network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mindspeed_mm_dit.configs.diffusion import WanFlowConfig
from mindspeed_mm_dit.framework import nn, ops
from mindspeed_mm_dit.objectives.flow.process import column
from mindspeed_mm_dit.objectives.flow.solvers import euler, integrate
from mindspeed_mm_dit.objectives.registry import ModelFn, Tensor
from mindspeed_mm_dit.objectives.wan_flow.objective import euler_sigmas, multistep_sigmas

SIGMA, WEIGHT = range(2)
"""Columns of the coefficients in a training batch."""


class WanFlow(nn.Module):
    """A straight path between data and noise; the network predicts its velocity towards noise (Liu et al. 2023).

    Tensors named x, noise or output are (B, C, ...) with any axes after the channels.
    """

    draw_names = ("timesteps", "noise", "coefficients")

    def __init__(self, config: WanFlowConfig) -> None:
        super().__init__()
        self.config = config

    def add_noise(self, x: Tensor, timesteps: Tensor, noise: Tensor, coefficients: Tensor) -> Tensor:
        """Mix data and noise: x_t = (1 - sigma) x + sigma noise."""
        sigma = column(coefficients, SIGMA, x)
        return (1 - sigma) * x + sigma * noise

    def target(self, x: Tensor, noise: Tensor) -> Tensor:
        """Return the velocity dx_t / dsigma between data ``x`` and ``noise``."""
        return noise - x

    def loss(
        self,
        output: Tensor,
        x: Tensor,
        noised: Tensor,
        timesteps: Tensor,
        noise: Tensor,
        coefficients: Tensor,
        known: Tensor | None = None,
    ) -> Tensor:
        """Return the mean squared error of the velocity, weighted by its row of the table, (B,).

        output: the network's output at ``add_noise`` and ``timesteps`` (B,), float32; coefficients: (B, 2); known:
        (B, 1, F, H, W), 1 for conditioning frames, which do not count.
        """
        error = output - self.target(x, noise)
        if known is None:
            return coefficients[:, WEIGHT] * ops.mean_per_sample(error * error)
        counts = 1 - known
        mean = ops.mean_per_sample(error * error * counts) / ops.mean_per_sample(counts)
        return coefficients[:, WEIGHT] * mean


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


def euler_trajectory(process: WanFlow, model_fn: ModelFn, start: Tensor, steps: int) -> Iterator[Tensor]:
    """Take Euler steps along MindSpeed-MM's table."""

    def velocity(x: Tensor, sigmas: np.ndarray) -> Tensor:
        return _call_model(process, model_fn, x, sigmas)

    return integrate(euler, velocity, start, euler_sigmas(process.config, steps))


def unipc_trajectory(process: WanFlow, model_fn: ModelFn, start: Tensor, steps: int) -> Iterator[Tensor]:
    """Take UniPC steps along the pipeline's table; the network gets exact times, which the pipeline truncates."""

    def data_at(x: Tensor, sigma: float) -> Tensor:
        return x - sigma * _call_model(process, model_fn, x, np.full(x.shape[0], sigma))

    return unipc(data_at, start, multistep_sigmas(process.config, steps))


def _call_model(process: WanFlow, model_fn: ModelFn, x: Tensor, sigmas: np.ndarray) -> Tensor:
    timesteps = process.config.num_train_timesteps * sigmas
    return model_fn(x, ops.tensor(timesteps.astype(np.float32)), sigmas)
