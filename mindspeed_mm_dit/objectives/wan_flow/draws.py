"""The draws for a training batch: rows of the table of times, and noise. No framework."""

from __future__ import annotations

import numpy as np

from mindspeed_mm_dit.configs.wan_flow import WanFlowConfig
from mindspeed_mm_dit.data.draws import Stream, generator, normals
from mindspeed_mm_dit.objectives.contract import Arrays
from mindspeed_mm_dit.objectives.wan_flow.schedule import training_table


def draws(config: WanFlowConfig, seed: int, sample_indices: np.ndarray, shape: tuple[int, ...]) -> Arrays:
    """Return timesteps (B,) in (0, T], noise (B, *shape), and coefficients (B, 2), each float32.

    ``sample_indices`` (B,) are those of one micro-batch; the first determines the time if all samples share one.
    """
    first, end = config.trained_rows
    deciding = sample_indices if config.timestep_per == "sample" else np.repeat(sample_indices[:1], len(sample_indices))
    rows = [generator(seed, Stream.TIMESTEP, sample_index).integers(first, end) for sample_index in deciding.tolist()]
    return batch(config, np.array(rows), normals(seed, Stream.NOISE, sample_indices, shape))


def draws_at(config: WanFlowConfig, noise_levels: np.ndarray, noise: np.ndarray) -> Arrays:
    """Return the same for the trained rows at ``noise_levels`` (B,), from 0 (data) to 1 (noise)."""
    first, end = config.trained_rows
    return batch(config, np.rint(end - 1 - noise_levels * (end - 1 - first)).astype(np.int64), noise)


def batch(config: WanFlowConfig, rows: np.ndarray, noise: np.ndarray) -> Arrays:
    """Return the arrays of a training batch at ``rows`` (B,) of the table; coefficients are sigma and weight."""
    table = training_table(config)
    sigmas = table.sigmas[rows]
    return {
        "timesteps": (config.num_train_timesteps * sigmas).astype(np.float32),
        "noise": noise,
        "coefficients": np.stack([sigmas, table.weights[rows]], 1).astype(np.float32),
    }
