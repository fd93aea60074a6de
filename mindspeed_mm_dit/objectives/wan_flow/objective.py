"""Wan's flow matching as an objective: tables of times in float64, and the draws of a batch. No framework.

Times go from noise (sigma = 1) to data (sigma = 0).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from mindspeed_mm_dit.configs.diffusion import WanFlowConfig, shifted, table_sigmas
from mindspeed_mm_dit.data.order import Stream, generator, normals
from mindspeed_mm_dit.framework.contract import lazy_module
from mindspeed_mm_dit.objectives.registry import Arrays, Objective, without_noise


class TrainingTable(NamedTuple):
    """The times that training draws from, each (T,) float64, from noise to data."""

    sigmas: np.ndarray
    """Noise levels."""
    weights: np.ndarray
    """Weights of the loss: a bell around sigma = 1/2, lowered to a minimum of 0 and scaled to a mean of 1."""


@lru_cache(maxsize=16)
def training_table(config: WanFlowConfig) -> TrainingTable:
    """Return the table of ``config.num_train_timesteps`` rows."""
    sigmas = table_sigmas(config, config.num_train_timesteps)
    bell = np.exp(-2 * (sigmas - 0.5) ** 2)
    bell -= bell.min()
    return TrainingTable(sigmas, bell / bell.mean())


def euler_sigmas(config: WanFlowConfig, steps: int) -> np.ndarray:
    """Return the sigmas of MindSpeed-MM's ``steps`` sampling steps, (steps + 1,): its table, then data."""
    return np.append(table_sigmas(config, steps), 0.0)


def multistep_sigmas(config: WanFlowConfig, steps: int) -> np.ndarray:
    """Return the sigmas of diffusers' Wan pipeline, (steps + 1,): from one training time below pure noise, whose
    log-SNR is infinite, to data."""
    return shifted(np.linspace(1 - 1 / config.num_train_timesteps, 0.0, steps + 1), config.shift)


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


_process = lazy_module("mindspeed_mm_dit.objectives.wan_flow.process")

WAN_FLOW = Objective(
    WanFlowConfig,
    lambda config: _process.WanFlow(config),
    draws,
    draws_at,
    {
        "euler": without_noise(lambda *args: _process.euler_trajectory(*args)),
        "unipc": without_noise(lambda *args: _process.unipc_trajectory(*args)),
    },
    quick_sampler="unipc",
)
