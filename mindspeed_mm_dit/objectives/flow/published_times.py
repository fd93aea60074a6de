"""Published tables of sampling times, by the network they were made for: noise levels from 1 to 0. No framework."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from mindspeed_mm_dit.configs.flow_matching import mu_of

Sigmas = Callable[[int, tuple[int, ...], float], np.ndarray]
"""(steps, shape (C, H, W) of a latent, shift) -> noise levels (steps + 1,) float64, the last 0."""
_LEAST, _QWEN_END = 0.001, 0.02
"""Lowest noise level of SD3's table before its shifts; level at which Qwen-Image's ends, before 0."""


def _shifted(sigmas: np.ndarray, shift: float) -> np.ndarray:
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def _even(steps: int) -> np.ndarray:
    return np.linspace(1, 1 / steps, steps)


def _ended(sigmas: np.ndarray) -> np.ndarray:
    return np.append(sigmas, 0.0)


def _tokens(shape: tuple[int, ...]) -> float:
    """Return the patches of 2 x 2 of latents (C, H, W)."""
    return math.prod(shape[1:]) / 4


def flux2_mu(tokens: float, steps: int) -> float:
    """Return the logarithm of FLUX.2's shift for an image of ``tokens`` and a chain of ``steps``."""
    of_200 = 0.00016927 * tokens + 0.45666666
    of_10 = 8.73809524e-05 * tokens + 1.89833333
    return of_200 if tokens > 4300 else of_10 + (of_200 - of_10) * (steps - 10) / 190


def _flux(steps: int, shape: tuple[int, ...], shift: float) -> np.ndarray:
    return _ended(_shifted(_even(steps), math.exp(mu_of("flux", _tokens(shape)))))


def _flux2(steps: int, shape: tuple[int, ...], shift: float) -> np.ndarray:
    return _ended(_shifted(_even(steps), math.exp(flux2_mu(math.prod(shape[1:]), steps))))


def _qwen_image(steps: int, shape: tuple[int, ...], shift: float) -> np.ndarray:
    sigmas = _shifted(_even(steps), math.exp(mu_of("qwen_image", _tokens(shape))))
    return _ended(1 - (1 - sigmas) * (1 - _QWEN_END) / (1 - sigmas[-1]) if steps > 1 else sigmas)


def _sd3(steps: int, shape: tuple[int, ...], shift: float) -> np.ndarray:
    """Shift the low end twice, as diffusers does."""
    return _ended(_shifted(np.linspace(1, _shifted(np.array(_LEAST), shift), steps), shift))


def _sd3_dynamic(steps: int, shape: tuple[int, ...], shift: float) -> np.ndarray:
    return _ended(_shifted(np.linspace(1, _LEAST, steps), math.exp(mu_of("flux", _tokens(shape)))))


PUBLISHED: Mapping[str, Sigmas] = {
    "flux": _flux, "flux2": _flux2, "qwen_image": _qwen_image, "sd3": _sd3, "sd3_dynamic": _sd3_dynamic,
}  # fmt: skip
