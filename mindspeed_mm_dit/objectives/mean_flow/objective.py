"""MeanFlow as an objective, and its sampler, which takes one or a few steps from noise to data."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from mindspeed_mm_dit.configs.mean_flow import MeanFlowConfig
from mindspeed_mm_dit.framework.lazy_imports import later
from mindspeed_mm_dit.objectives.contract import ModelFn, Objective, Tensor, without_noise
from mindspeed_mm_dit.objectives.mean_flow.draws import draws, draws_at

_process = later("mindspeed_mm_dit.objectives.mean_flow.process")


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
