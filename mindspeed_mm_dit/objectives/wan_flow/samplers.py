"""Samplers of Wan's flow matching: Euler as in MindSpeed-MM, UniPC as in diffusers' Wan pipeline."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mindspeed_mm_dit.framework import ops
from mindspeed_mm_dit.objectives.contract import ModelFn, Tensor
from mindspeed_mm_dit.objectives.flow import ode
from mindspeed_mm_dit.objectives.wan_flow.process import WanFlow
from mindspeed_mm_dit.objectives.wan_flow.schedule import euler_sigmas, multistep_sigmas
from mindspeed_mm_dit.objectives.wan_flow.unipc import unipc


def euler_trajectory(process: WanFlow, model_fn: ModelFn, start: Tensor, steps: int) -> Iterator[Tensor]:
    """Take Euler steps along MindSpeed-MM's table."""

    def velocity(x: Tensor, sigmas: np.ndarray) -> Tensor:
        return _call_model(process, model_fn, x, sigmas)

    return ode.integrate(ode.euler, velocity, start, euler_sigmas(process.config, steps))


def unipc_trajectory(process: WanFlow, model_fn: ModelFn, start: Tensor, steps: int) -> Iterator[Tensor]:
    """Take UniPC steps along the pipeline's table; the network gets exact times, which the pipeline truncates."""

    def data_at(x: Tensor, sigma: float) -> Tensor:
        return x - sigma * _call_model(process, model_fn, x, np.full(x.shape[0], sigma))

    return unipc(data_at, start, multistep_sigmas(process.config, steps))


def _call_model(process: WanFlow, model_fn: ModelFn, x: Tensor, sigmas: np.ndarray) -> Tensor:
    timesteps = process.config.num_train_timesteps * sigmas
    return model_fn(x, ops.tensor(timesteps.astype(np.float32)), sigmas)
