"""Wan's flow matching on tensors: noising and the training loss."""

from __future__ import annotations

from typing import Any

from mindspeed_mm_dit.configs.wan_flow import WanFlowConfig
from mindspeed_mm_dit.framework import nn, ops
from mindspeed_mm_dit.objectives.flow.process import column

Tensor = Any  # a tensor of the active framework

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

    def noised(self, x: Tensor, timesteps: Tensor, noise: Tensor, coefficients: Tensor) -> Tensor:
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

        output: the network's output at ``noised`` and ``timesteps`` (B,), float32; coefficients: (B, 2); known:
        (B, 1, F, H, W), 1 for conditioning frames, which do not count.
        """
        error = output - self.target(x, noise)
        if known is None:
            return coefficients[:, WEIGHT] * ops.mean_per_sample(error * error)
        counts = 1 - known
        mean = ops.mean_per_sample(error * error * counts) / ops.mean_per_sample(counts)
        return coefficients[:, WEIGHT] * mean
