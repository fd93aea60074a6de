"""Laws of the training times, and the shift of any time towards noise. No framework. t = 0 is noise, t = 1 data."""

from __future__ import annotations

import numpy as np

from mindspeed_mm_dit.data.draws import Stream, generator
from mindspeed_mm_dit.objectives.flow.config import FlowMatchingConfig


def shifted(t: np.ndarray, shift: float) -> np.ndarray:
    """Move times towards noise by ``shift`` > 1, towards data by less (Esser et al. 2024, eq. 23); 0 and 1 stay.

    The paper's t is 1 - t here.
    """
    return t / (t + shift * (1 - t))


def logit_normal(z: np.ndarray, mean: float, std: float) -> np.ndarray:
    """Turn standard normal draws into times in (0, 1) whose logits are normal (Esser et al. 2024, eq. 19)."""
    return 1 / (1 + np.exp(-(mean + std * z)))


def training_times(config: FlowMatchingConfig, seed: int, positions: np.ndarray) -> np.ndarray:
    """Return the time of the samples at ``positions`` (B,), float32 in the interval of training."""
    draws = [generator(seed, Stream.TIMESTEP, position) for position in positions.tolist()]
    if config.timestep_sampling == "uniform":
        t = np.array([draw.random() for draw in draws])
    else:
        z = np.array([draw.standard_normal() for draw in draws])
        t = logit_normal(z, config.logit_mean, config.logit_std)
    first, last = config.train_interval()
    return (first + (last - first) * shifted(t, config.shift)).astype(np.float32)


def sampling_times(config: FlowMatchingConfig, steps: int, last_step: float = 0.0) -> np.ndarray:
    """Return the ``steps`` + 1 times of a chain of even steps, before any shift, float64."""
    first, last = config.sample_interval(last_step)
    return first + (last - first) * shifted(np.linspace(0.0, 1.0, steps + 1), config.shift)
