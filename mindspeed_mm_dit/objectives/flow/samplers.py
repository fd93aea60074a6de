"""Samplers of flow matching: the ODE with Euler, Heun or dopri5, the SDE with Euler-Maruyama or Heun."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mindspeed_mm_dit.framework import ops
from mindspeed_mm_dit.objectives.flow import solvers
from mindspeed_mm_dit.objectives.flow.path import DiffusionCoefficient, point_at
from mindspeed_mm_dit.objectives.flow.process import FlowMatching
from mindspeed_mm_dit.objectives.flow.timesteps import network_time, sampling_times, sde_times
from mindspeed_mm_dit.objectives.registry import ModelFn, NoiseAt, Tensor

_ODE_STEPS = {"euler": solvers.euler, "heun": solvers.heun}
_SDE_STEPS = {"sde-euler": solvers.euler_maruyama, "sde-heun": solvers.sde_heun}


def ode_trajectory(name: str, process: FlowMatching, model_fn: ModelFn, start: Tensor, steps: int) -> Iterator[Tensor]:
    """Take ``steps`` steps on a fixed grid with the config's shift; for predicted data the last is Euler's (JiT)."""
    times = sampling_times(process.config, steps, start.shape[1:])
    last = solvers.euler if process.prediction_type == "data" else None
    return solvers.integrate(_ODE_STEPS[name], _velocity(process, model_fn), _scaled(process, start), times, last)


def dopri5_trajectory(
    process: FlowMatching, model_fn: ModelFn, start: Tensor, steps: int, rtol: float, atol: float
) -> Iterator[Tensor]:
    """Take steps of sizes chosen per sample; yield the state at ``steps`` even times."""
    times = sampling_times(process.config, steps, start.shape[1:])
    return solvers.dopri5(_velocity(process, model_fn), _scaled(process, start), times, rtol, atol)


def sde_trajectory(
    name: str,
    process: FlowMatching,
    model_fn: ModelFn,
    start: Tensor,
    noise_at: NoiseAt,
    steps: int,
    diffusion: DiffusionCoefficient,
) -> Iterator[Tensor]:
    """Take ``steps`` steps, the last of the kind that ``diffusion`` names."""
    times = sde_times(process.config, steps, diffusion, start.shape[1:])

    def fields(x: Tensor, t: np.ndarray) -> tuple[Tensor, Tensor]:
        output = _call_model(process, model_fn, x, t)
        return process.velocity(output, x, t), process.score(output, x, t)

    equation = solvers.Sde(fields, lambda t: point_at(process.config, t), diffusion)
    return solvers.integrate_sde(_SDE_STEPS[name], equation, _scaled(process, start), times, noise_at)


def _scaled(process: FlowMatching, start: Tensor) -> Tensor:
    """Scale standard normal noise to the noise of the path."""
    scale = process.config.noise_scale
    return start if scale == 1 else scale * start


def _velocity(process: FlowMatching, model_fn: ModelFn) -> solvers.Velocity:
    return lambda x, t: process.velocity(_call_model(process, model_fn, x, t), x, t)


def _call_model(process: FlowMatching, model_fn: ModelFn, x: Tensor, t: np.ndarray) -> Tensor:
    return model_fn(x, ops.tensor(network_time(process.config, t)), 1 - t)
