"""MeanFlow (Geng et al. 2025) as an objective: the draws of a batch, and a sampler of one or a few steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from mindspeed_mm_dit.configs.diffusion import MeanFlowConfig
from mindspeed_mm_dit.data.order import Stream, generator, normals
from mindspeed_mm_dit.framework.contract import lazy_module
from mindspeed_mm_dit.objectives.registry import Arrays, ModelFn, Objective, Tensor, without_noise


def draws(config: MeanFlowConfig, seed: int, sample_indices: np.ndarray, shape: tuple[int, ...]) -> Arrays:
    """Return times (B, 2), t and r <= t in (0, 1), noise (B, *shape), and held_out (B,): zeros; each float32."""
    rngs = [generator(seed, Stream.TIMESTEP, sample_index) for sample_index in sample_indices.tolist()]
    ends = interval(config, np.stack([rng.standard_normal(2) for rng in rngs], axis=1))
    equal = np.array([rng.random() for rng in rngs]) < config.data_proportion
    return _batch(set_equal_times(ends, equal), normals(seed, Stream.NOISE, sample_indices, shape), held_out=0.0)


def draws_at(config: MeanFlowConfig, noise_levels: np.ndarray, noise: np.ndarray) -> Arrays:
    """Return the same for held-out samples at the times ``noise_levels`` (B,): r = t, and an unweighted error."""
    return _batch(np.stack([noise_levels, noise_levels], 1), noise, held_out=1.0)


def interval(config: MeanFlowConfig, z: np.ndarray) -> np.ndarray:
    """Turn standard normal draws (2, B) into times (B, 2), the later first."""
    times = 1 / (1 + np.exp(-(config.logit_mean + config.logit_std * z)))
    return np.stack([times.max(0), times.min(0)], 1)


def set_equal_times(times: np.ndarray, alike: np.ndarray) -> np.ndarray:
    """Return ``times`` (B, 2) with r = t where ``alike`` (B,) is true."""
    return np.stack([times[:, 0], np.where(alike, times[:, 0], times[:, 1])], 1)


def _batch(times: np.ndarray, noise: np.ndarray, held_out: float) -> Arrays:
    held_outs = np.full(len(times), held_out, np.float32)
    return {"times": times.astype(np.float32), "noise": noise, "held_out": held_outs}


_process = lazy_module("mindspeed_mm_dit.objectives.mean_flow.process")


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
