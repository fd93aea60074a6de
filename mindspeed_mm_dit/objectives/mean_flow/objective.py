"""MeanFlow as an objective, and its sampler, which takes one or a few steps from noise to data."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.mean_flow import MeanFlowConfig
from mindspeed_mm_dit.objectives.contract import Ask, NoiseAt, NoOptions, Objective, Sampler, Tensor
from mindspeed_mm_dit.objectives.mean_flow.draws import draws, draws_at


def _build(config: MeanFlowConfig) -> Any:
    from mindspeed_mm_dit.objectives.mean_flow.process import MeanFlow

    return MeanFlow(config)


def even_times(steps: int) -> np.ndarray:
    """Return the times of a chain of even steps."""
    return np.linspace(1.0, 0.0, steps + 1)


def walk(ask: Ask, x: Tensor, times: np.ndarray) -> Iterator[Tensor]:
    """Yield the state after each step of the falling ``times``: z - (t - r) u(z, r, t) (Geng et al. 2025, eq. 12)."""
    from mindspeed_mm_dit.framework import ops

    for t, r in itertools.pairwise(times):
        ends = ops.tensor(np.tile(np.array([[t, r]], np.float32), (x.shape[0], 1)))
        x = x - float(t - r) * ask(x, ends, np.full(x.shape[0], t))
        yield x


def _mean(process: Any, ask: Ask, start: Tensor, noise_at: NoiseAt, steps: int, options: NoOptions) -> Iterator[Tensor]:
    return walk(ask, start, even_times(steps))


MEAN_FLOW = Objective(
    MeanFlowConfig, _build, draws, draws_at, {"mean": Sampler(_mean, NoOptions)}, quick_sampler="mean", asks=True
)
