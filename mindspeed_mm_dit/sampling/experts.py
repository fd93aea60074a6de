"""The two experts of Wan 2.2 (A14B) while samples are drawn: one network for high noise, one for low noise.

Their networks are alike, so they take turns in the memory of one. Its weights are replaced when the other is asked,
once on the way from noise to each batch of samples.
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
ONE_NETWORK = ("is for two experts", f"name the other with {FLAG}")
"""Reason and cure of an error about a setting of experts where there is one network."""


@dataclass
class Experts:
    """What is known of both besides the model that is sampled, which is the expert of high noise."""

    boundary: float
    """Noise level from which on the expert of high noise answers."""
    low: str
    """The checkpoint of the expert of low noise, as it was named."""
    read: tuple[Callable[[], Arrays], Callable[[], Arrays]]
    """Read the weights of the expert of high noise, and of low noise."""
    loaded: int = field(default=0, init=False)
    """Whose weights the network has: 0 high noise, 1 low noise."""

    def __post_init__(self) -> None:
        self.boundary = number("--boundary", self.boundary, 0.0, 1.0)

    def networks(self, network: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Return both experts as functions; each makes ``network`` its own before it answers."""

        def expert(which: int) -> Callable[..., Any]:
            def answer(*inputs: Any) -> Any:
                if self.loaded != which:
                    runtime.load_arrays(network, self.read[which]())
                    self.loaded = which
                return network(*inputs)

            return answer

        return expert(0), expert(1)


def boundary_between(high: ModelConfig, low: ModelConfig, asked: float | None, where: str) -> float:
    """Return the noise level that parts two experts: ``asked``, or where the windows they were trained on meet.

    Raises ConfigError, naming ``where``, for experts of different networks, in the wrong order, or that leave a gap.
    """
    _check_alike(high, low, where)
    (bottom, top), (low_bottom, low_top) = high.diffusion.window, low.diffusion.window
    whole = {(bottom, top), (low_bottom, low_top)} & {(0, 1)}
    if not whole and low_bottom >= top:
        raise ConfigError(
            where, f"was trained on noise levels from {low_bottom:g} to {low_top:g}, above those of --checkpoint: it "
            "is the expert of high noise", "swap the two",
        )  # fmt: skip
    if not whole and (bottom, top) == (low_bottom, low_top):
        raise ConfigError(where, f"is an expert of the same noise levels as --checkpoint, {bottom:g} to {top:g}",
                          "name the checkpoint of the other expert")  # fmt: skip
    if asked is None:
        if whole or bottom != low_top:
            raise ConfigError(
                "--boundary", f"is needed: the experts were trained from {bottom:g} to {top:g} and from {low_bottom:g} "
                f"to {low_top:g}", "Wan 2.2 has 0.875 for texts, 0.9 for images",
            )  # fmt: skip
        return bottom
    return asked


def _check_alike(high: ModelConfig, low: ModelConfig, where: str) -> None:
    """Raise ConfigError unless two experts differ in their weights, sizes of samples and times of training alone."""
    for config, what in ((high, "--checkpoint"), (low, where)):
        if not isinstance(config.diffusion, WanFlowConfig):
            raise ConfigError(what, "was not trained with wan_flow_match_scheduler, which alone has experts")
    for section in ("predictor", "diffusion"):
        here, there = vars(getattr(high, section)), vars(getattr(low, section))
        for name, value in here.items():
            if there.get(name) != value and name not in ("latent_size", "timestep_window", "timestep_per"):
                raise ConfigError(
                    where, f"is of another model than --checkpoint: {section}.{name} is {there.get(name)!r}, and there "
                    f"{value!r}", "name two experts of one config folder",
                )  # fmt: skip
