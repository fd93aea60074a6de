"""MeanFlow on tensors (Geng et al. 2025). Its target contains a derivative of the network along the path.

Tensors named x, noise, z or v are (B, C, ...); times are (B, 2): t, and r <= t.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from mindspeed_mm_dit.configs.diffusion import MeanFlowConfig
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.framework import nn, ops

Tensor = Any  # a tensor of the active framework
Network = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(z, times, labels (B,)) -> the average velocity from t down to r, (B, C, ...)."""


class MeanFlow(nn.Module):
    """The straight path z = (1 - t) x + t noise, and the average u of its velocity v = noise - x from r to t."""

    draw_names = ("times", "noise", "held_out")

    def __init__(self, config: MeanFlowConfig) -> None:
        super().__init__()
        self.config = config

    def add_noise(self, x: Tensor, times: Tensor, noise: Tensor, held_out: Tensor) -> Tensor:
        """Return z at the later time."""
        t = per_sample_factor(times[:, 0], x)
        return (1 - t) * x + t * noise

    def loss(self, *args: Tensor) -> Tensor:
        """Raise ConfigError: one output of the network is not enough."""
        raise ConfigError(
            "diffusion.model_id = 'mean_flow' needs several calls of the network for its loss, and this host makes "
            "one. Train with pretrain_dit.py, standalone or inside Megatron."
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
        z, v = self.add_noise(x, times, noise, held_out), noise - x
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
        return ops.stop_gradient(guided - per_sample_factor(times[:, 0] - times[:, 1], z) * rate)

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
        applies = per_sample_factor(
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


def per_sample_factor(values: Tensor, x: Tensor) -> Tensor:
    """Return ``values`` (B,) as a tensor that multiplies the samples of ``x`` (B, ...)."""
    return ops.reshape(values, (x.shape[0],) + (1,) * (len(x.shape) - 1))
