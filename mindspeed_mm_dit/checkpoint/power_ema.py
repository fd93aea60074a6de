"""Power-function EMAs of the weights, and post-hoc EMA: any width from those that were saved.

Karras et al. 2024, "Analyzing and Improving the Training Dynamics of Diffusion Models", section 3.1 and appendix C.
After step t, the weights at step s count (gamma + 1) s^gamma / t^(gamma + 1): a profile that scales with the run.
EMAs of two widths, saved at some steps, span a space in which the EMA of any other width is fitted by least squares.
The factors are constrained to sum to one, which Karras et al. leave to the fit, so that constant weights do not change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mindspeed_mm_dit.errors import ConfigError

TREE = "power_ema_"
"""Prefix of the EMAs' names in a checkpoint, before 1, 2, ..., in the order of STDS in its facts."""
STDS = "power_ema_stds"
"""Key of run.json: the widths."""
MAX_INTERVALS = 10_000
"""Most parts that a run is divided into; in a longer run a part is several steps."""
MIN_STD = 0.001
MAX_STD = 1 / math.sqrt(12)
"""Width of the plain mean of all steps, gamma = 0."""


class EmaProfile(NamedTuple):
    """The profile of an EMA: the weight of each step."""

    step: int
    """Steps of the run so far."""
    std: float
    """Width: standard deviation of the profile, as a fraction of ``step``."""


def is_std_list(value: object) -> bool:
    """Return whether ``value`` is a list of widths, as run.json stores it."""
    return isinstance(value, list) and all(type(std) in (int, float) and MIN_STD <= std <= MAX_STD for std in value)


def tree_names(count: int) -> list[str]:
    """Return the names of ``count`` EMAs in a checkpoint."""
    return [f"{TREE}{number}" for number in range(1, count + 1)]


def gamma_of_std(std: float) -> float:
    """Return gamma of the width: std^2 = (gamma + 1) / ((gamma + 2)^2 (gamma + 3)).

    Raises:
        ValueError: the width is out of range.
    """
    if not MIN_STD <= std <= MAX_STD:
        raise ValueError(f"must be from {MIN_STD} to {MAX_STD:.4f}, the plain mean of all steps")
    roots = np.roots([1, 7, 16 - std**-2, 12 - std**-2])
    return max(0.0, float(roots.real.max()))


def decay_weight(step: int, gamma: float) -> float:
    """Return how far the EMA moves to the weights after step 1, 2, ...: 1 - (1 - 1 / step)^(gamma + 1)."""
    return 1.0 if step == 1 else -math.expm1((gamma + 1) * math.log1p(-1 / step))


def solve_coefficients(saved: Sequence[EmaProfile], target: EmaProfile) -> tuple[np.ndarray, float]:
    """Return the factors with which the EMAs ``saved`` sum up closest to ``target``, and the error of that sum.

    The factors, float64, add up to one. The error is the root mean square error of the profile, relative to that of
    ``target``: 0 if ``target`` is one of ``saved``, close to 0 if every step was saved.
    """
    if target in saved:
        return np.array([float(profile == target) for profile in saved]), 0.0
    edges = _step_edges(sorted({profile.step for profile in (*saved, target)}))
    scale = np.sqrt(np.diff(edges))
    *basis, last = (_step_weights(profile, edges) / scale for profile in saved)
    target_column = _step_weights(target, edges) / scale
    if not basis:
        return np.ones(1), float(np.linalg.norm(last - target_column) / np.linalg.norm(target_column))
    differences = np.stack([column - last for column in basis], 1)  # the last factor makes the sum one
    factors = np.linalg.lstsq(differences, target_column - last, rcond=None)[0]
    error = np.linalg.norm(differences @ factors + last - target_column) / np.linalg.norm(target_column)
    return np.append(factors, 1 - factors.sum()), float(error)


def _step_edges(steps: Sequence[int]) -> np.ndarray:
    """Return the edges of parts from 0 to the last of ``steps``: one step each, or several if there are many."""
    even = np.linspace(0, steps[-1], min(steps[-1], MAX_INTERVALS) + 1).round()
    return np.union1d(even, [float(step) for step in steps])


def _step_weights(profile: EmaProfile, edges: np.ndarray) -> np.ndarray:
    """Return the weight in the EMA of the steps between each two edges; the weights sum to one."""
    return np.diff(np.minimum(edges / profile.step, 1.0) ** (gamma_of_std(profile.std) + 1))


def check_stds(stds: Sequence[float], saved: Sequence[float], where: str) -> None:
    """Raise ConfigError if a checkpoint has EMAs of other widths than ``stds``; having none is fine."""
    if stds and saved and list(stds) != list(saved):
        raise ConfigError(
            f"--power-ema-stds = {_listed(stds)} must be {_listed(saved)}, the widths of the averages in {where}. From "
            "these, mm-dit ema makes an average of any other width."
        )


def _listed(stds: Sequence[float]) -> str:
    return " ".join(f"{std:g}" for std in stds)
