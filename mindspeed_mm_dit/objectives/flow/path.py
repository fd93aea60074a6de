"""The paths from noise x_0 to data x_1: x_t = alpha x_1 + sigma x_0 (Ma et al. 2024, table 1). No framework.

Times are always known on the host, so everything that depends on them is computed there in float64, for all frameworks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mindspeed_mm_dit.configs.flow_matching import FlowMatchingConfig


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
