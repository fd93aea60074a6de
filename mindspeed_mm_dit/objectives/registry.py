"""Objectives: their interface (draw a batch, add noise, compute the loss, sample), and all of them by ``model_id``.

No framework is imported here. To add one: a module with a record, and ``register_objective``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mindspeed_mm_dit.configs.limits import MAX_STEPS, check_between, shorten_repr
from mindspeed_mm_dit.configs.strict import from_mapping
from mindspeed_mm_dit.data.order import VALIDATION_START, Stream, normals, van_der_corput
from mindspeed_mm_dit.errors import ConfigError, flag_of, nearest
from mindspeed_mm_dit.registry import Registry

Tensor = Any
Arrays = dict[str, np.ndarray]
ModelFn = Callable[[Tensor, Tensor, Any], Tensor]
"""(x (B, C, ...), the network's time input (B,), noise level of x: a number, or an array (B,)) -> the network's output
for the requested condition, float32; guided if the noise level lies in the guided interval."""
NoiseAt = Callable[[int], Tensor]
"""Sampling step, counted from the start -> standard normal in the shape of x."""


NOISE_LEVEL = "noise_level"
"""Name of the noise levels in a batch of held-out samples, (B,) float32: 0 for data, towards 1 for noise."""


def check_steps(config: Any, steps: int, options: Any) -> None:
    """Raise ConfigError unless ``steps`` is in the range of every sampler."""
    check_between("--steps", steps, 1, MAX_STEPS)


class Sampler(NamedTuple):
    """A sampler: turns noise into latents."""

    trajectory: Callable[..., Iterator[Tensor]]
    """(process, ModelFn, start, NoiseAt, steps, options) -> iterator over the states; the last is the latents."""
    options: type
    """Frozen dataclass of further settings; each field is a flag of mm-dit sample (:func:`option`)."""
    check: Callable[[Any, int, Any], None] = check_steps
    """(config, steps, options): raise ConfigError if the sampler cannot take these."""


class Objective(NamedTuple):
    """An objective, selected by ``model_id`` in section ``diffusion`` of model.json."""

    config: type
    """Frozen dataclass of the section. It has ``check_output(in_channels, out_channels)`` and ``saved_tensors``."""
    build: Callable[[Any], Any]
    """(config) -> the process."""
    draws: Callable[[Any, int, np.ndarray, tuple[int, ...]], Arrays]
    """(config, seed, sample indices (B,), shape of a latent) -> arrays (B, ...) by ``draw_names``."""
    draws_at: Callable[[Any, np.ndarray, np.ndarray], Arrays]
    """(config, noise levels (B,), noise (B, ...)) -> the same, at chosen times."""
    samplers: dict[str, Sampler]
    """By name; the first is the published one."""
    quick_sampler: str
    """Name of a deterministic sampler, for previews during training."""
    calls_model: bool = False
    """Whether its loss needs more than one output of the network; so far only for networks conditioned on a label."""


@dataclass(frozen=True)
class NoOptions:
    """For a sampler without options."""


def option(default: Any, words: str) -> Any:
    """Return a field of a sampler's options; ``words``: its help text in mm-dit sample."""
    return field(default=default, metadata={"help": words})


def without_noise(trajectory: Callable[[Any, ModelFn, Tensor, int], Iterator[Tensor]]) -> Sampler:
    """Return the sampler of a ``trajectory`` (process, model_fn, start, steps) that takes neither noise nor options."""
    return Sampler(
        lambda process, model_fn, start, noise_at, steps, options: trajectory(process, model_fn, start, steps),
        NoOptions,
    )


OBJECTIVES = Registry[Objective]("objective")


def register_objective(model_id: str, objective: Objective) -> None:
    """Add an objective, so that section ``diffusion`` can name its ``model_id``.

    Raises ConfigError if the name is taken.
    """
    OBJECTIVES[model_id] = objective


def objective_of(config: Any) -> Objective:
    """Return the objective that a section ``diffusion`` names."""
    return OBJECTIVES[config.model_id]


def training_draw(config: Any) -> Callable[[int, np.ndarray, tuple[int, ...]], Arrays]:
    """Return the function that draws training batches: (seed, sample indices, shape of a latent) -> arrays by name."""
    return partial(objective_of(config).draws, config)


def validation_draw(config: Any) -> Callable[[int, np.ndarray, tuple[int, ...]], Arrays]:
    """Return the function that draws held-out batches, with the signature of ``training_draw``.

    Their times cover the noise levels evenly, whatever the distribution of training times. Each sample's noise level is
    in the batch as ``NOISE_LEVEL``.
    """

    def draw(seed: int, sample_indices: np.ndarray, shape: tuple[int, ...]) -> Arrays:
        points = sample_indices - VALIDATION_START + 1  # (skips point 0, the data, where weights may be infinite)
        noise_levels = van_der_corput(points)
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
            f"{flag} = {shorten_repr(name)} must be the name of a sampler. Use one of {', '.join(samplers)}."
        )
    if name not in samplers:
        others = [model_id for model_id, objective in OBJECTIVES.items() if name in objective.samplers]
        if others:
            problem = f"is for {' and '.join(others)}, but this model was trained with {config.model_id}. "
        else:
            problem = f"is an unknown sampler. {nearest(name, samplers)}"
        raise ConfigError(f"{flag} = {name!r} {problem}The samplers for {config.model_id} are {', '.join(samplers)}.")
    return samplers[name]


def sampler_options(config: Any, name: str, values: Mapping[str, Any]) -> Any:
    """Build the options of the sampler ``name`` from ``values``; raises ConfigError for an unknown one."""
    kind = find_sampler(config, name).options
    known = [field.name for field in dataclasses.fields(kind)]
    for key, value in values.items():
        if key not in known:
            raise ConfigError(
                f"{flag_of(str(key))} = {shorten_repr(value)} is not an option of the sampler {name!r}. "
                + (f"It has {', '.join(map(flag_of, known))}." if known else "Leave it out.")
            )
    where = f"sampler {name}"
    try:
        return from_mapping(kind, dict(values), where)
    except ConfigError as error:  # (for a value of the wrong type, name the flag instead of the key)
        key, _, rest = str(error).removeprefix(f"{where}: ").partition(" ")
        raise ConfigError(f"{flag_of(key.removeprefix('--'))} {rest.replace(' or null', ' or None')}") from None
