"""Gaussian diffusion as an objective."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.diffusion import GaussianDiffusionConfig
from mindspeed_mm_dit.data.order import Stream, normals, timesteps
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.framework.contract import lazy_module
from mindspeed_mm_dit.objectives.gaussian.schedule import respaced_steps
from mindspeed_mm_dit.objectives.registry import Arrays, ModelFn, NoiseAt, Objective, Sampler, Tensor, option

_process = lazy_module("mindspeed_mm_dit.objectives.gaussian.process")
_STRIDED = ("ddim",)
"""Samplers whose steps are a whole number of timesteps apart, as published."""


@dataclass(frozen=True)
class Clip:
    """Options of all Gaussian samplers."""

    clip: float | None = option(None, "bound on the predicted clean latents; 1 suits pixel models")

    def __post_init__(self) -> None:
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise ConfigError(f"--clip = {self.clip} must be a positive number.")


def _draws(config: GaussianDiffusionConfig, seed: int, sample_indices: np.ndarray, shape: tuple[int, ...]) -> Arrays:
    return {
        "timesteps": timesteps(seed, sample_indices, config.num_train_timesteps),
        "noise": normals(seed, Stream.NOISE, sample_indices, shape),
    }


def _draws_at(config: GaussianDiffusionConfig, noise_levels: np.ndarray, noise: np.ndarray) -> Arrays:
    count = config.num_train_timesteps
    steps = np.floor(noise_levels * count + 1e-9).astype(np.int64)  # (each timestep covers an equal range of levels)
    return {"timesteps": np.minimum(steps, count - 1), "noise": noise}


def _respacing(name: str, steps: int) -> str:
    return f"ddim{steps}" if name in _STRIDED else str(steps)


def _sampler(name: str, function: str) -> Sampler:
    """Return the record of the generator ``function`` in process.py."""

    def trajectory(
        process: Any, model_fn: ModelFn, start: Tensor, noise_at: NoiseAt, steps: int, options: Clip
    ) -> Iterator[Tensor]:
        last = max(len(process.schedule) - 1, 1)
        respaced = process.respaced(respaced_steps(len(process.schedule), _respacing(name, steps)))
        states: Iterator[Tensor] = getattr(_process, function)(
            respaced, lambda x, t, timestep: model_fn(x, t, timestep / last), start, noise_at, clip=options.clip
        )
        return states

    def check(config: GaussianDiffusionConfig, steps: int, options: Clip) -> None:
        respaced_steps(config.num_train_timesteps, _respacing(name, steps))

    return Sampler(trajectory, Clip, check)


_SAMPLERS = {"ddpm": "ddpm", "ddim": "ddim", "dpm++": "dpm_solver_pp"}
"""Name of each sampler -> its generator."""

GAUSSIAN_DIFFUSION = Objective(
    GaussianDiffusionConfig,
    lambda config: _process.GaussianDiffusion.from_config(config),
    _draws,
    _draws_at,
    {name: _sampler(name, function) for name, function in _SAMPLERS.items()},
    quick_sampler="ddim",
)
