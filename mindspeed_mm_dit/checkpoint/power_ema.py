"""Power-function averages of the weights, and any width of them from those that were kept.

Karras et al. 2024, "Analyzing and Improving the Training Dynamics of Diffusion Models", section 3.1 and appendix C.
After step t a moment s of the run counts (gamma + 1) s^gamma / t^(gamma + 1): the same share of a run of any length.
Averages of two widths, kept at some steps, span a space in which that of any other width is found by least squares. The
factors are held to a sum of one, which the paper leaves to the fit, so that what no longer moves comes out as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mindspeed_mm_dit.errors import ConfigError

TREE = "power_ema_"
"""With 1, 2, ...: names of these averages in a checkpoint, in the order of STDS of its facts."""
STDS = "power_ema_stds"
"""Key of run.json: the widths."""
MOST_PARTS = 10_000
"""Of a run, in which steps are told apart; a longer run is looked at in parts of several steps."""
SMALLEST_STD = 0.001
LARGEST_STD = 1 / math.sqrt(12)
"""Of the plain mean of all steps, gamma = 0."""


class Profile(NamedTuple):
    """What the steps count in an average."""

    step: int
    """Steps of the run so far."""
    std: float
    """Width: standard deviation of the steps so counted, as a share of ``step``."""


def are_stds(value: object) -> bool:
    """Return whether ``value`` is a list of widths, as run.json has it."""
    return isinstance(value, list) and all(
        type(std) in (int, float) and SMALLEST_STD <= std <= LARGEST_STD for std in value
    )


def trees(count: int) -> list[str]:
    """Return the names of ``count`` averages in a checkpoint."""
    return [f"{TREE}{number}" for number in range(1, count + 1)]


def exponent(std: float) -> float:
    """Return gamma of the width: std^2 = (gamma + 1) / ((gamma + 2)^2 (gamma + 3)).

    Raises:
        ValueError: there is no average of that width here.
    """
    if not SMALLEST_STD <= std <= LARGEST_STD:
        raise ValueError(f"a width is from {SMALLEST_STD} to {LARGEST_STD:.4f}, the plain mean of all steps")
    roots = np.roots([1, 7, 16 - std**-2, 12 - std**-2])
    return max(0.0, float(roots.real.max()))


def share(step: int, gamma: float) -> float:
    """Return how far an average moves to the weights after step 1, 2, ...: 1 - (1 - 1 / step)^(gamma + 1)."""
    return 1.0 if step == 1 else -math.expm1((gamma + 1) * math.log1p(-1 / step))


def combination(kept: Sequence[Profile], wanted: Profile) -> tuple[np.ndarray, float]:
    """Return the factors of the averages ``kept`` whose sum is closest to ``wanted``, and how close it is.

    The factors, float64, add up to one. Closeness: the root mean square error of what the steps count, relative to what
    they count in ``wanted``; 0 where one of ``kept`` is it, and close to 0 where every step was kept.
    """
    if wanted in kept:
        return np.array([float(profile == wanted) for profile in kept]), 0.0
    edges = _edges(sorted({profile.step for profile in (*kept, wanted)}))
    scale = np.sqrt(np.diff(edges))
    *basis, last = (_counted(profile, edges) / scale for profile in kept)
    towards = _counted(wanted, edges) / scale
    if not basis:
        return np.ones(1), float(np.linalg.norm(last - towards) / np.linalg.norm(towards))
    differences = np.stack([column - last for column in basis], 1)  # the last takes what is left of one
    factors = np.linalg.lstsq(differences, towards - last, rcond=None)[0]
    error = np.linalg.norm(differences @ factors + last - towards) / np.linalg.norm(towards)
    return np.append(factors, 1 - factors.sum()), float(error)


def _edges(steps: Sequence[int]) -> np.ndarray:
    """Return ends of single steps, from 0 to the last of ``steps``, or of a few steps each where there are many."""
    even = np.linspace(0, steps[-1], min(steps[-1], MOST_PARTS) + 1).round()
    return np.union1d(even, [float(step) for step in steps])


def _counted(profile: Profile, edges: np.ndarray) -> np.ndarray:
    """Return what the steps between two edges count in an average; all together one."""
    return np.diff(np.minimum(edges / profile.step, 1.0) ** (exponent(profile.std) + 1))


def check_stds(stds: Sequence[float], kept: Sequence[float], where: str) -> None:
    """Raise ConfigError where a checkpoint has averages of widths other than ``stds``; none there is good."""
    if stds and kept and list(stds) != list(kept):
        raise ConfigError(
            f"--power-ema-stds = {_shown(stds)}",
            f"{where} has the averages of {_shown(kept)}",
            f"go on with --power-ema-stds {_shown(kept)}; mm-dit ema makes any other width of them",
        )


def _shown(stds: Sequence[float]) -> str:
    return " ".join(f"{std:g}" for std in stds)
