"""From noise to latents along the flow: the ODE by Euler, Heun or dopri5, the SDE by Euler-Maruyama or Heun."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mindspeed_mm_dit.framework import ops
from mindspeed_mm_dit.objectives.contract import Ask, NoiseAt, Tensor
from mindspeed_mm_dit.objectives.flow import ode, sde
from mindspeed_mm_dit.objectives.flow.diffusion import Diffusion
from mindspeed_mm_dit.objectives.flow.path import PATHS
from mindspeed_mm_dit.objectives.flow.process import FlowMatching
from mindspeed_mm_dit.objectives.flow.timesteps import sampling_times, sde_times

_ODE_STEPS = {"euler": ode.euler, "heun": ode.heun}
_SDE_STEPS = {"sde-euler": sde.euler_maruyama, "sde-heun": sde.heun}


def ode_chain(name: str, process: FlowMatching, ask: Ask, start: Tensor, steps: int) -> Iterator[Tensor]:
    """Walk ``steps`` steps of a fixed grid, shifted as in training."""
    return ode.walk(_ODE_STEPS[name], _velocity(process, ask), start, sampling_times(process.config, steps))


def dopri5_chain(
    process: FlowMatching, ask: Ask, start: Tensor, steps: int, rtol: float, atol: float
) -> Iterator[Tensor]:
    """Walk with steps chosen for each sample; yields at ``steps`` even times."""
    return ode.dopri5(_velocity(process, ask), start, sampling_times(process.config, steps), rtol, atol)


def sde_chain(
    name: str, process: FlowMatching, ask: Ask, start: Tensor, noise_at: NoiseAt, steps: int, diffusion: Diffusion
) -> Iterator[Tensor]:
    """Walk ``steps`` steps, the last of them as ``diffusion`` says."""
    times, path = sde_times(process.config, steps, diffusion), PATHS[process.config.path]

    def fields(x: Tensor, t: np.ndarray) -> tuple[Tensor, Tensor]:
        output = _ask(ask, x, t)
        return process.velocity(output, x, t), process.score(output, x, t)

    equation = sde.Sde(fields, path, diffusion)
    return sde.walk(_SDE_STEPS[name], equation, start, times, noise_at)


def _velocity(process: FlowMatching, ask: Ask) -> ode.Velocity:
    return lambda x, t: process.velocity(_ask(ask, x, t), x, t)


def _ask(ask: Ask, x: Tensor, t: np.ndarray) -> Tensor:
    return ask(x, ops.tensor(t.astype(np.float32)), 1 - t)
