"""The draws for a training batch of flow matching: times, noise, and the path's coefficients for the loss."""

from __future__ import annotations

import numpy as np

from mindspeed_mm_dit.configs.flow_matching import FlowMatchingConfig
from mindspeed_mm_dit.data.draws import Stream, normals
from mindspeed_mm_dit.objectives.contract import Arrays
from mindspeed_mm_dit.objectives.flow.path import PathPoint, point_at
from mindspeed_mm_dit.objectives.flow.timesteps import least_rest, network_time, training_times

_WEIGHTS = {
    "sigma_sqrt": lambda sigma: sigma**-2.0,
    "cosmap": lambda sigma: 2 / (np.pi * (1 - 2 * sigma + 2 * sigma**2)),
    "data": lambda sigma: sigma**2,
}
"""Weights of a velocity's loss by noise level, as in diffusers' training scripts (Esser et al. 2024)."""


def draws(config: FlowMatchingConfig, seed: int, sample_indices: np.ndarray, shape: tuple[int, ...]) -> Arrays:
    """Return timesteps (B,) as the network takes them, noise (B, *shape), and coefficients (B, 5), each float32."""
    times = training_times(config, seed, sample_indices, shape)
    return _batch(config, times, normals(seed, Stream.NOISE, sample_indices, shape))


def draws_at(config: FlowMatchingConfig, noise_levels: np.ndarray, noise: np.ndarray) -> Arrays:
    """Return the same for times at ``noise_levels`` (B,), from 0 (data) to 1 (noise)."""
    first, last = config.train_interval()
    return _batch(config, (last + (first - last) * noise_levels).astype(np.float32), noise)


def coefficients(config: FlowMatchingConfig, t: np.ndarray) -> np.ndarray:
    """Return alpha, sigma, alpha', sigma' and the weight of the loss at times ``t`` (B,), as (B, 5) float32."""
    point = point_at(config, t.astype(np.float64))
    columns = (point.alpha, point.sigma, point.d_alpha, point.d_sigma, _loss_weight(config, point, t))
    return np.stack(columns, 1).astype(np.float32)


def _batch(config: FlowMatchingConfig, t: np.ndarray, noise: np.ndarray) -> Arrays:
    return {"timesteps": network_time(config, t), "noise": noise, "coefficients": coefficients(config, t)}


def _loss_weight(config: FlowMatchingConfig, point: PathPoint, t: np.ndarray) -> np.ndarray:
    """Return the published weights: "velocity" makes the loss that of a velocity network, up to the path's ratio.

    For predicted data the loss is that of the velocity (data - x_t) / max(1 - t, t_eps).
    """
    if config.prediction_type == "data":
        return least_rest(config, t) ** -2
    if config.loss_weight is None:
        return np.ones_like(point.alpha)
    if config.prediction_type == "velocity":
        return _WEIGHTS[config.loss_weight](point.sigma)
    if config.loss_weight == "velocity":
        return (point.score_gain / point.sigma) ** 2
    return point.score_gain / point.sigma**2
