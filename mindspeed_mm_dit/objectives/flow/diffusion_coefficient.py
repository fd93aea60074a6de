"""The diffusion coefficient of the SDE, and its last step (Ma et al. 2024, section 3.3)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mindspeed_mm_dit.configs.limits import check_between
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.objectives.contract import option
from mindspeed_mm_dit.objectives.flow.path import PathPoint

DIFFUSIONS: dict[str, Callable[[np.ndarray, PathPoint], np.ndarray]] = {
    "constant": lambda t, point: np.ones_like(t),
    "SBDM": lambda t, point: point.score_gain,
    "sigma": lambda t, point: point.sigma,
    "linear": lambda t, point: 1 - t,
}
"""Published forms of D(t) that are proportional to their norm."""


_MOST_NORM = 1000.0
"""Largest scale of D; published ones are about 1."""


@dataclass(frozen=True)
class DiffusionCoefficient:
    """How much noise a sampler adds and removes in each step, and its last step."""

    form: Literal["constant", "SBDM", "sigma", "linear", "decreasing", "increasing-decreasing"] = option(
        "sigma", "diffusion over time: constant, SBDM, sigma, linear, decreasing, increasing-decreasing"
    )
    """D(t): that of score-based diffusion (SBDM), or another form chosen at sampling (Ma et al. 2024, section 3.3)."""
    norm: float = option(1.0, "scale of the diffusion")
    last_step: Literal["Mean", "Tweedie", "Euler"] | None = option(
        "Mean", "last step, without noise, after the even ones: Mean, Tweedie, Euler, or None"
    )
    """Mean: the SDE's drift; Tweedie: Tweedie's estimate; Euler: the ODE's velocity."""
    last_step_size: float = option(0.04, "length of the last step")

    def __post_init__(self) -> None:
        check_between("--norm", self.norm, 0.0, _MOST_NORM)
        if not 0 < self.last_step_size < 1:
            raise ConfigError(f"--last-step-size = {self.last_step_size}", "must lie between 0 and 1")

    def at(self, t: np.ndarray, point: PathPoint) -> np.ndarray:
        """Return D(t), float64 in the shape of ``t``; ``point``: the path at ``t``."""
        if self.form == "decreasing":
            return 0.25 * (self.norm * np.cos(math.pi * t) + 1) ** 2
        if self.form == "increasing-decreasing":
            return self.norm * np.sin(math.pi * t) ** 2
        return self.norm * DIFFUSIONS[self.form](t, point)
