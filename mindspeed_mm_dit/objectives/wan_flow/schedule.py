"""Tables of times, from noise (sigma = 1) to data (sigma = 0). No framework; all in float64."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from mindspeed_mm_dit.configs.wan_flow import WanFlowConfig, shifted, table_sigmas


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
