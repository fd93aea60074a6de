"""The two experts of Wan 2.2 (A14B) during sampling: one network for high noise, one for low noise.

Both have the same architecture, so only one is in memory. Its weights are swapped when the other expert is called, once
per batch of samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.limits import number
from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.configs.wan_flow import WanFlowConfig
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.framework import runtime

Arrays = dict[str, np.ndarray]
FLAG = "--low-noise-checkpoint"
ONE_NETWORK = ("needs two experts", f"name the other with {FLAG}")
"""Reason and cure of an error about a setting of experts where there is one network."""


@dataclass
class Experts:
    """Two experts; the model being sampled is the high-noise expert."""

    boundary: float
    """Noise level from which on the high-noise expert is used."""
    low: str
    """The checkpoint of the low-noise expert, as named by the user."""
    read: tuple[Callable[[], Arrays], Callable[[], Arrays]]
    """Read the weights of the high-noise expert, and of the low-noise expert."""
    loaded: int = field(default=0, init=False)
    """Whose weights the network has: 0 high noise, 1 low noise."""

    def __post_init__(self) -> None:
        self.boundary = number("--boundary", self.boundary, 0.0, 1.0)

    def networks(self, network: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Return both experts as functions; each loads its weights into ``network`` if needed."""

        def expert(which: int) -> Callable[..., Any]:
            def forward(*inputs: Any) -> Any:
                if self.loaded != which:
                    runtime.load_arrays(network, self.read[which]())
                    self.loaded = which
                return network(*inputs)

            return forward

        return expert(0), expert(1)


def boundary_between(high: ModelConfig, low: ModelConfig, requested: float | None, where: str) -> float:
    """Return the noise level at which two experts switch: ``requested``, or where their training windows meet.

    Raises ConfigError, naming ``where``, for experts of different networks, in the wrong order, or that leave a gap.
    """
    _check_alike(high, low, where)
    (bottom, top), (low_bottom, low_top) = high.diffusion.window, low.diffusion.window
    whole = {(bottom, top), (low_bottom, low_top)} & {(0, 1)}
    if not whole and low_bottom >= top:
        raise ConfigError(
            where,
            f"was trained on noise levels from {low_bottom:g} to {low_top:g}, above those of --checkpoint: it is the "
            "high-noise expert",
            "swap the two",
        )
    if not whole and (bottom, top) == (low_bottom, low_top):
        reason = f"is an expert of the same noise levels as --checkpoint, {bottom:g} to {top:g}"
        raise ConfigError(where, reason, "name the checkpoint of the other expert")
    if requested is None:
        if whole or bottom != low_top:
            raise ConfigError(
                "--boundary",
                f"is needed: the experts were trained on {bottom:g} to {top:g} and on {low_bottom:g} to {low_top:g}",
                "Wan 2.2 has 0.875 for texts, 0.9 for images",
            )
        return bottom
    return requested


def _check_alike(high: ModelConfig, low: ModelConfig, where: str) -> None:
    """Raise ConfigError unless two experts differ in their weights, sizes of samples and times of training alone."""
    for config, what in ((high, "--checkpoint"), (low, where)):
        if not isinstance(config.diffusion, WanFlowConfig):
            raise ConfigError(what, "was not trained with wan_flow_match_scheduler, the only objective with experts")
    for section in ("predictor", "diffusion"):
        high_settings, low_settings = vars(getattr(high, section)), vars(getattr(low, section))
        for name, value in high_settings.items():
            if low_settings.get(name) != value and name not in ("latent_size", "timestep_window", "timestep_per"):
                raise ConfigError(
                    where,
                    f"is of another model than --checkpoint: {section}.{name} is {low_settings.get(name)!r}, and there "
                    f"{value!r}",
                    "name two experts of one config folder",
                )
