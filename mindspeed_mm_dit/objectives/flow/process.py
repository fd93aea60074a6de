"""Flow matching on tensors: noising, the training loss, and reading a network's output (Ma et al. 2024)."""

from __future__ import annotations

from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.diffusion import FlowMatchingConfig
from mindspeed_mm_dit.framework import nn, ops
from mindspeed_mm_dit.objectives.flow.path import point_at
from mindspeed_mm_dit.objectives.flow.timesteps import coefficients, remaining_time

Tensor = Any  # a tensor of the active framework

ALPHA, SIGMA, D_ALPHA, D_SIGMA, WEIGHT = range(5)
"""Columns of the coefficients in a training batch."""


class FlowMatching(nn.Module):
    """A path, the quantity that the network predicts along it, and the weight of its error.

    Tensors named x, noise or output are (B, C, ...) with any axes after the channels. An output may have more
    channels, of which only the first C are used (SiT keeps the DiT's learned variance without using it).
    """

    draw_names = ("timesteps", "noise", "coefficients")

    def __init__(self, config: FlowMatchingConfig) -> None:
        super().__init__()
        self.config = config
        self.prediction_type = config.prediction_type

    def coefficients(self, t: np.ndarray) -> np.ndarray:
        """Return the path's coefficients for a training batch at times ``t`` (B,), (B, 5) float32."""
        return coefficients(self.config, t)

    def add_noise(self, x: Tensor, timesteps: Tensor, noise: Tensor, coefficients: Tensor) -> Tensor:
        """Mix data and noise: x_t = alpha x + sigma noise (Ma et al. 2024, eq. 1)."""
        return column(coefficients, ALPHA, x) * x + column(coefficients, SIGMA, x) * noise

    def target(self, x: Tensor, noise: Tensor, coefficients: Tensor) -> Tensor:
        """Return the velocity of the path between data ``x`` and ``noise`` (Ma et al. 2024, eq. 3)."""
        return column(coefficients, D_ALPHA, x) * x + column(coefficients, D_SIGMA, x) * noise

    def predicted(self, output: Tensor, x: Tensor) -> Tensor:
        """Return the predicted quantity in ``output``, (B, C, ...); a velocity points towards data."""
        channels = output[:, : x.shape[1]]
        points_to_noise = self.prediction_type == "velocity" and self.config.data_time == 0
        return -channels if points_to_noise else channels

    def loss(
        self, output: Tensor, x: Tensor, noised: Tensor, timesteps: Tensor, noise: Tensor, coefficients: Tensor
    ) -> Tensor:
        """Return the weighted mean squared error of the predicted quantity, (B,) (Ma et al. 2024, eqs. 5 and 7).

        output: the network at ``add_noise`` and ``timesteps`` (B,), the times of ``coefficients`` (B, 5); float32.
        """
        predicted = self.predicted(output, x)
        if self.prediction_type == "velocity":
            error = predicted - self.target(x, noise, coefficients)
        elif self.prediction_type == "noise":
            error = predicted - noise
        elif self.prediction_type == "data":
            error = predicted - x
        else:
            error = column(coefficients, SIGMA, x) * predicted + noise
        losses = coefficients[:, WEIGHT] * ops.mean_per_sample(error * error)
        return losses + self.cosine_distance(predicted, x, noise, coefficients) if self.config.cosine_loss else losses

    def cosine_distance(self, predicted: Tensor, x: Tensor, noise: Tensor, coefficients: Tensor) -> Tensor:
        """Return 1 - the cosine between a predicted velocity and the true one over channels, (B,) (Yao & Wang 2025)."""
        return ops.mean_per_sample(1 - ops.cosine_similarity(predicted, self.target(x, noise, coefficients), 1))

    def velocity(self, output: Tensor, x: Tensor, t: np.ndarray) -> Tensor:
        """Return dx/dt of the path at ``x`` and times ``t`` (B,), from the network's ``output``."""
        predicted = self.predicted(output, x)
        if self.prediction_type == "velocity":
            return predicted
        if self.prediction_type == "data":
            return per_sample_factor(1 / remaining_time(self.config, t), x) * (predicted - x)
        point = point_at(self.config, t)
        return per_sample_factor(point.alpha_ratio, x) * x + per_sample_factor(point.score_gain, x) * self.score(
            output, x, t
        )

    def score(self, output: Tensor, x: Tensor, t: np.ndarray) -> Tensor:
        """Return the gradient of x_t's log-density at ``x`` and times ``t`` (B,), from the network's ``output``."""
        predicted = self.predicted(output, x)
        if self.prediction_type == "score":
            return predicted
        point = point_at(self.config, t)
        if self.prediction_type == "noise":
            return per_sample_factor(-1 / point.sigma, x) * predicted
        if self.prediction_type == "data":
            return per_sample_factor(point.sigma**-2, x) * (per_sample_factor(point.alpha, x) * predicted - x)
        q = point.alpha / point.d_alpha
        below = point.sigma**2 - q * point.sigma * point.d_sigma
        return per_sample_factor(q / below, x) * predicted - per_sample_factor(1 / below, x) * x


def per_sample_factor(values: np.ndarray, x: Tensor) -> Tensor:
    """Return ``values`` (B,) as a float32 tensor that multiplies the samples of ``x`` (B, ...)."""
    return ops.tensor(values.astype(np.float32).reshape(-1, *(1 for _ in x.shape[1:])))


def column(coefficients: Tensor, number: int, x: Tensor) -> Tensor:
    """Return a column of ``coefficients`` (B, ...) as a tensor that multiplies the samples of ``x`` (B, ...)."""
    return ops.reshape(coefficients[:, number], (x.shape[0],) + (1,) * (len(x.shape) - 1))
