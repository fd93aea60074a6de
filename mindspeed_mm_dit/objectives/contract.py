"""What an objective offers: how a batch is drawn, noised, scored, and walked back. No framework is touched here.

An objective is one record. Its process, a module of the active framework, is built when it is first needed and has

- ``draw_names``: names of what :attr:`Objective.draws` draws; the first is what the network is told, the second noise,
- ``noised(latents, *draws)`` -> x_t, the latents mixed with noise,
- ``loss(output, latents, x_t, *draws)`` -> (B,) float32, with ``output`` what the network said at x_t, float32. One
  that ``asks`` the network itself has ``losses(network, null label, latents, labels, *draws)`` in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from mindspeed_mm_dit.configs.limits import MOST_STEPS, check_between

Tensor = Any
Arrays = dict[str, np.ndarray]
Ask = Callable[[Tensor, Tensor, Any], Tensor]
"""(x (B, C, ...), what the network is told of the time (B,), share of noise in x: a number, or an array (B,)) -> output
of the network for the condition of the chain, guided where the share of noise says so; float32."""
NoiseAt = Callable[[int], Tensor]
"""Step of the chain, counted from the start of sampling -> standard normal in the shape of x."""


NOISE_LEVEL = "noise_share"
"""Name in a batch of held-out samples of how much of each is noise, (B,) float32: 0 for data, towards 1 for noise."""


def check_steps(config: Any, steps: int, options: Any) -> None:
    """Raise ConfigError for more steps than any chain has."""
    check_between("--steps", steps, 1, MOST_STEPS, "use fewer")


class Sampler(NamedTuple):
    """A way from noise to latents."""

    chain: Callable[..., Iterator[Tensor]]
    """(process, Ask, start, NoiseAt, steps, options) -> iterator over the states; the last is the latents."""
    options: type
    """Frozen dataclass of what else can be set; each field is a flag of mm-dit sample (:func:`option`)."""
    check: Callable[[Any, int, Any], None] = check_steps
    """(config, steps, options): raise ConfigError for a chain that there cannot be."""


class Objective(NamedTuple):
    """What is learned, as a section ``diffusion`` of model.json chooses it by ``model_id``."""

    config: type
    """Frozen dataclass of the section. It has ``check_output(in_channels, out_channels)`` and ``kept_tensors``."""
    build: Callable[[Any], Any]
    """(config) -> the process."""
    draws: Callable[[Any, int, np.ndarray, tuple[int, ...]], Arrays]
    """(config, seed, positions (B,), shape of a latent) -> arrays (B, ...) by ``draw_names``."""
    draws_at: Callable[[Any, np.ndarray, np.ndarray], Arrays]
    """(config, shares (B,) of the way from data to noise, noise (B, ...)) -> the same, at chosen times."""
    samplers: dict[str, Sampler]
    """By name; the first is the published one."""
    quick_sampler: str
    """One of them without noise of its own, for images to look at."""
    asks: bool = False
    """Whether its loss takes more of the network than one answer; so far of networks that a label steers."""


@dataclass(frozen=True)
class NoOptions:
    """Options of a sampler that has none."""


def option(default: Any, words: str) -> Any:
    """Return a field of a sampler's options, which --help of mm-dit sample explains by ``words``."""
    return field(default=default, metadata={"help": words})
