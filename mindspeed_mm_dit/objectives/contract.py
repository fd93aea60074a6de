"""The interface of an objective: draw a batch, add noise, compute the loss, and sample. No framework is imported here.

An objective is one record. Its process, a module of the active framework, is built when first needed and has

- ``draw_names``: names of the arrays of :attr:`Objective.draws`; the first is the network's time input, the second
  noise,
- ``noised(latents, *draws)`` -> x_t, the latents mixed with noise,
- ``loss(output, latents, x_t, *draws)`` -> (B,) float32, with ``output`` the network's output at x_t, float32. An
  objective that ``calls_model`` itself has ``losses(network, unconditional label, latents, labels, *draws)`` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from mindspeed_mm_dit.configs.limits import MOST_STEPS, check_between

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
    check_between("--steps", steps, 1, MOST_STEPS, "use fewer")


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
