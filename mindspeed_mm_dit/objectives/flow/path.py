"""The paths from noise x_0 to data x_1: x_t = alpha x_1 + sigma x_0 (Ma et al. 2024, table 1), and their diffusion.

The diffusion coefficient of the SDE and its last step follow section 3.3. No framework.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mindspeed_mm_dit.configs.diffusion import FlowMatchingConfig
from mindspeed_mm_dit.configs.limits import check_between
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.objectives.registry import option


@dataclass(frozen=True)
class PathPoint:
    """A path at times t; each field is float64 in the shape of t. A prime means d/dt."""

    alpha: np.ndarray
    """Coefficient of the data."""
    d_alpha: np.ndarray
    """alpha'."""
    sigma: np.ndarray
    """Coefficient of the noise."""
    d_sigma: np.ndarray
    """sigma'."""

    @property
    def alpha_ratio(self) -> np.ndarray:
        """r = alpha' / alpha; infinite if alpha is 0."""
        with np.errstate(divide="ignore"):
            return np.asarray(self.d_alpha / self.alpha)

    @property
    def score_gain(self) -> np.ndarray:
        """w = r sigma^2 - sigma sigma', the weight of the score in the velocity: v = r x + w score."""
        return self.alpha_ratio * self.sigma**2 - self.sigma * self.d_sigma

    def with_noise(self, scale: float) -> PathPoint:
        """Return the path with noise ``scale`` times as large."""
        return PathPoint(self.alpha, self.d_alpha, scale * self.sigma, scale * self.d_sigma)


def linear(t: np.ndarray) -> PathPoint:
    """x_t = t x_1 + (1 - t) x_0."""
    return PathPoint(t, np.ones_like(t), 1 - t, -np.ones_like(t))


def gvp(t: np.ndarray) -> PathPoint:
    """x_t = sin(pi t / 2) x_1 + cos(pi t / 2) x_0, which preserves the variance."""
    angle, speed = 0.5 * math.pi * t, 0.5 * math.pi
    return PathPoint(np.sin(angle), speed * np.cos(angle), np.cos(angle), -speed * np.sin(angle))


def vp(t: np.ndarray, beta_min: float = 0.1, beta_max: float = 20.0) -> PathPoint:
    """The variance-preserving SDE of Song et al. 2021 with time reversed; at t = 1, sigma' is infinite."""
    beta = beta_min + (beta_max - beta_min) * (1 - t)
    log_alpha = -0.25 * (beta_max - beta_min) * (1 - t) ** 2 - 0.5 * beta_min * (1 - t)
    alpha, sigma = np.exp(log_alpha), np.sqrt(-np.expm1(2 * log_alpha))
    with np.errstate(divide="ignore"):
        return PathPoint(alpha, 0.5 * beta * alpha, sigma, -0.5 * beta * alpha**2 / sigma)


PATHS: dict[str, Callable[[np.ndarray], PathPoint]] = {"linear": linear, "gvp": gvp, "vp": vp}


def point_at(config: FlowMatchingConfig, t: np.ndarray) -> PathPoint:
    """Return the path of ``config``, with its noise scale, at times ``t``, float64."""
    return PATHS[config.path](t).with_noise(config.noise_scale)


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
            raise ConfigError(f"--last-step-size = {self.last_step_size} must lie between 0 and 1.")

    def at(self, t: np.ndarray, point: PathPoint) -> np.ndarray:
        """Return D(t), float64 in the shape of ``t``; ``point``: the path at ``t``."""
        if self.form == "decreasing":
            return 0.25 * (self.norm * np.cos(math.pi * t) + 1) ** 2
        if self.form == "increasing-decreasing":
            return self.norm * np.sin(math.pi * t) ** 2
        return self.norm * DIFFUSIONS[self.form](t, point)
