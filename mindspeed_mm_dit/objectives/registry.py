"""The objectives by ``model_id`` of section ``diffusion``. To add one: a folder, a record, ``register_objective``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.limits import short_repr
from mindspeed_mm_dit.configs.strict import from_mapping
from mindspeed_mm_dit.data.draws import VALIDATION_START, Stream, evenly_spread, normals
from mindspeed_mm_dit.errors import ConfigError, flag_of, nearest
from mindspeed_mm_dit.objectives.contract import NOISE_LEVEL, Arrays, Objective, Sampler
from mindspeed_mm_dit.registry import Registry

OBJECTIVES = Registry[Objective]("objective")


def register_objective(model_id: str, objective: Objective) -> None:
    """Add an objective, so that section ``diffusion`` can name its ``model_id``.

    Raises ConfigError if the name is taken.
    """
    OBJECTIVES[model_id] = objective


def objective_of(config: Any) -> Objective:
    """Return the objective that a section ``diffusion`` names."""
    return OBJECTIVES[config.model_id]


def draw_of(config: Any) -> Callable[[int, np.ndarray, tuple[int, ...]], Arrays]:
    """Return the function that draws training batches: (seed, sample indices, shape of a latent) -> arrays by name."""
    return partial(objective_of(config).draws, config)


def validation_draw_of(config: Any) -> Callable[[int, np.ndarray, tuple[int, ...]], Arrays]:
    """Return the function that draws held-out batches, with the signature of ``draw_of``.

    Their times cover the noise levels evenly, whatever the distribution of training times. Each sample's noise level is
    in the batch as ``NOISE_LEVEL``.
    """

    def draw(seed: int, sample_indices: np.ndarray, shape: tuple[int, ...]) -> Arrays:
        points = sample_indices - VALIDATION_START + 1  # (skips point 0, the data, where weights may be infinite)
        noise_levels = evenly_spread(points)
        noise = normals(seed, Stream.NOISE, sample_indices, shape)
        return {
            **objective_of(config).draws_at(config, noise_levels, noise),
            NOISE_LEVEL: noise_levels.astype(np.float32),
        }

    return draw


def find_sampler(config: Any, name: str, flag: str = "--sampler") -> Sampler:
    """Return the sampler ``name`` of the objective of section ``config``.

    Raises:
        ConfigError: there is none, or it belongs to another objective.
    """
    samplers = objective_of(config).samplers
    if not isinstance(name, str):
        raise ConfigError(
            f"{flag} = {short_repr(name)}", "must be the name of a sampler", f"use one of {', '.join(samplers)}"
        )
    if name not in samplers:
        others = [model_id for model_id, objective in OBJECTIVES.items() if name in objective.samplers]
        reason = f"is for {' and '.join(others)}, and this model was trained with {config.model_id}"
        reason, hint = (reason, "") if others else ("unknown sampler", nearest(name, samplers))
        raise ConfigError(f"{flag} = {name!r}", reason, f"{hint}For {config.model_id}: {', '.join(samplers)}")
    return samplers[name]


def sampler_options(config: Any, name: str, values: Mapping[str, Any]) -> Any:
    """Build the options of the sampler ``name`` from ``values``; raises ConfigError for an unknown one."""
    kind = find_sampler(config, name).options
    known = [field.name for field in dataclasses.fields(kind)]
    for key, value in values.items():
        if key not in known:
            raise ConfigError(
                f"{flag_of(str(key))} = {short_repr(value)}",
                f"is not an option of the sampler {name!r}",
                f"it has {', '.join(map(flag_of, known))}" if known else "leave it out",
            )
    where = f"sampler {name}"
    try:
        return from_mapping(kind, dict(values), where)
    except ConfigError as error:  # (for a value of the wrong type, name the flag instead of the key)
        key, mark, value = error.what.removeprefix(f"{where}: ").partition(" = ")
        flag, reason = flag_of(key.removeprefix("--")), error.reason.replace(" or null", " or None")
        raise ConfigError(f"{flag}{mark}{value}", reason, error.cure) from None
