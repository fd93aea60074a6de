"""MeanFlow (Geng et al. 2025) as an objective: intervals of times, the loss, and a sampler of one or a few steps.

The target of the loss contains a derivative of the network along the path.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np

from mindspeed_mm_dit.configs.flow_matching import MeanFlowConfig
from mindspeed_mm_dit.data.order import Stream, generator, normals
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.framework import nn, ops
from mindspeed_mm_dit.framework.contract import later
from mindspeed_mm_dit.objectives.registry import Arrays, ModelFn, Objective, Tensor, without_noise


def draws(config: MeanFlowConfig, seed: int, sample_indices: np.ndarray, shape: tuple[int, ...]) -> Arrays:
    """Return times (B, 2), t and r <= t in (0, 1), noise (B, *shape), and held_out (B,): zeros; each float32."""
    rngs = [generator(seed, Stream.TIMESTEP, sample_index) for sample_index in sample_indices.tolist()]
    ends = interval(config, np.stack([rng.standard_normal(2) for rng in rngs], axis=1))
    equal = np.array([rng.random() for rng in rngs]) < config.data_proportion
    return _batch(with_equal(ends, equal), normals(seed, Stream.NOISE, sample_indices, shape), held_out=0.0)


def draws_at(config: MeanFlowConfig, noise_levels: np.ndarray, noise: np.ndarray) -> Arrays:
    """Return the same for held-out samples at the times ``noise_levels`` (B,): r = t, and an unweighted error."""
    return _batch(np.stack([noise_levels, noise_levels], 1), noise, held_out=1.0)


def interval(config: MeanFlowConfig, z: np.ndarray) -> np.ndarray:
    """Turn standard normal draws (2, B) into times (B, 2), the later first."""
    times = 1 / (1 + np.exp(-(config.logit_mean + config.logit_std * z)))
    return np.stack([times.max(0), times.min(0)], 1)


def with_equal(times: np.ndarray, alike: np.ndarray) -> np.ndarray:
    """Return ``times`` (B, 2) with r = t where ``alike`` (B,) is true."""
    return np.stack([times[:, 0], np.where(alike, times[:, 0], times[:, 1])], 1)


def _batch(times: np.ndarray, noise: np.ndarray, held_out: float) -> Arrays:
    held_outs = np.full(len(times), held_out, np.float32)
    return {"times": times.astype(np.float32), "noise": noise, "held_out": held_outs}


Network = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(z, times, labels (B,)) -> the average velocity from t down to r, (B, C, ...)."""


class MeanFlow(nn.Module):
    """The straight path z = (1 - t) x + t noise, and the average u of its velocity v = noise - x from r to t."""

    draw_names = ("times", "noise", "held_out")

    def __init__(self, config: MeanFlowConfig) -> None:
        super().__init__()
        self.config = config

    def noised(self, x: Tensor, times: Tensor, noise: Tensor, held_out: Tensor) -> Tensor:
        """Return z at the later time."""
        t = over_samples(times[:, 0], x)
        return (1 - t) * x + t * noise

    def loss(self, *args: Tensor) -> Tensor:
        """Raise ConfigError: one output of the network is not enough."""
        raise ConfigError(
            "diffusion.model_id = 'mean_flow'",
            "needs several calls of the network for its loss, and this host makes one",
            "train with pretrain_dit.py, standalone or inside Megatron",
        )

    def losses(
        self,
        network: Network,
        unconditional: int,
        x: Tensor,
        labels: Tensor,
        times: Tensor,
        noise: Tensor,
        held_out: Tensor,
    ) -> Tensor:
        """Return the loss of each sample, (B,): |u - u_target|^2 / (|u - u_target|^2 + c)^p (eqs. 10 and 22).

        unconditional: label of the unconditional class. held_out (B,): 1 for the mean squared error of the velocity.
        """
        z, v = self.noised(x, times, noise, held_out), noise - x
        target = self.target(network, z, v, times, labels, unconditional)
        u = ops.to_float32(network(z, times, labels))  # (B, C, ...)
        error = self.squared(u - target)  # (B,)
        weighted = error / self.denominator(error)
        return ops.where(held_out > 0, ops.mean_per_sample((u - v) * (u - v)), weighted)

    def target(
        self, network: Network, z: Tensor, v: Tensor, times: Tensor, labels: Tensor, unconditional: int
    ) -> Tensor:
        """Return u_target = v_g - (t - r) du/dt, without gradient (eq. 10)."""
        guided = self.guided(network, z, v, times, labels, unconditional)
        rate = self.derivative(network, z, guided, times, labels)
        return ops.stop_gradient(guided - over_samples(times[:, 0] - times[:, 1], z) * rate)

    def guided(
        self, network: Network, z: Tensor, v: Tensor, times: Tensor, labels: Tensor, unconditional: int
    ) -> Tensor:
        """Return v_g = omega v + (1 - omega - kappa) u(z, t, t, unconditional) + kappa u(z, t, t, label) (eq. 19).

        Outside the guided times, and for samples whose label is dropped, it is v.
        """
        config = self.config
        if not config.is_guided:
            return v
        t = times[:, 0]
        now = ops.cat([times[:, :1], times[:, :1]], 1)  # (B, 2): r = t
        v_g = config.omega * v
        for label, weight in ((labels * 0 + unconditional, 1 - config.omega - config.kappa), (labels, config.kappa)):
            if weight:
                v_g = v_g + weight * ops.to_float32(ops.without_gradient(network, z, now, label))
        applies = over_samples(
            ops.to_float32((t >= config.t_start) & (t <= config.t_end) & (labels != unconditional)), z
        )
        return ops.where(applies > 0, v_g, v)

    def derivative(self, network: Network, z: Tensor, v: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        """Return du/dt along the path, (B, C, ...): z changes at the rate ``v``, t at 1, r not at all (eq. 8)."""
        ones = times[:, :1] * 0 + 1
        tangents = (v, ops.cat([ones, ones * 0], 1))

        def labelled_network(z: Tensor, times: Tensor) -> Tensor:
            return network(z, times, labels)

        return ops.to_float32(ops.derivative_along(labelled_network, (z, times), tangents))

    def squared(self, error: Tensor) -> Tensor:
        """Return the sum of squares over a latent, (B,)."""
        return ops.mean_per_sample(error * error) * math.prod(error.shape[1:])

    def denominator(self, error: Tensor) -> Tensor:
        """Return (error + c)^p for squared errors (B,), without gradient (eq. 22)."""
        p, shifted = self.config.norm_p, ops.stop_gradient(error) + self.config.norm_eps
        return shifted if p == 1 else ops.exp(p * ops.log(shifted))


def over_samples(values: Tensor, x: Tensor) -> Tensor:
    """Return ``values`` (B,) as a tensor that multiplies the samples of ``x`` (B, ...)."""
    return ops.reshape(values, (x.shape[0],) + (1,) * (len(x.shape) - 1))


_process = later("mindspeed_mm_dit.objectives.mean_flow")


def even_times(steps: int) -> np.ndarray:
    """Return the times of ``steps`` even steps."""
    return np.linspace(1.0, 0.0, steps + 1)


def integrate(model_fn: ModelFn, x: Tensor, times: np.ndarray) -> Iterator[Tensor]:
    """Yield the state after each step of the falling ``times``: z - (t - r) u(z, r, t) (Geng et al. 2025, eq. 12)."""
    from mindspeed_mm_dit.framework import ops

    for t, r in itertools.pairwise(times):
        ends = ops.tensor(np.tile(np.array([[t, r]], np.float32), (x.shape[0], 1)))
        x = x - float(t - r) * model_fn(x, ends, np.full(x.shape[0], t))
        yield x


MEAN_FLOW = Objective(
    MeanFlowConfig,
    lambda config: _process.MeanFlow(config),
    draws,
    draws_at,
    {"mean": without_noise(lambda process, model_fn, start, steps: integrate(model_fn, start, even_times(steps)))},
    quick_sampler="mean",
    calls_model=True,
)
