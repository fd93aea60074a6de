"""Published tables of sampling times by network: noise levels from 1 to 0. No framework."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from mindspeed_mm_dit.configs.flow_matching import mu_of

Sigmas = Callable[[int, tuple[int, ...], float], np.ndarray]
"""(steps, shape (C, H, W) of a latent, shift) -> noise levels (steps,) float64, before the last, 0."""
_LEAST, _QWEN_END = 0.001, 0.02
"""Lowest noise level of SD3's table before its shifts; level at which Qwen-Image's ends, before 0."""


def _shifted(sigmas: np.ndarray, shift: float) -> np.ndarray:
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def _even(steps: int) -> np.ndarray:
    return np.linspace(1, 1 / steps, steps)


def _by_mu(sigmas: np.ndarray, mu: float) -> np.ndarray:
    return _shifted(sigmas, math.exp(mu))


def _tokens(shape: tuple[int, ...]) -> float:
    """Return the patches of 2 x 2 of latents (C, H, W)."""
    return math.prod(shape[1:]) / 4


def flux2_mu(tokens: float, steps: int) -> float:
    """Return the logarithm of FLUX.2's shift for an image of ``tokens`` and ``steps`` sampling steps."""
    mu_200 = 0.00016927 * tokens + 0.45666666
    mu_10 = 8.73809524e-05 * tokens + 1.89833333
    return mu_200 if tokens > 4300 else mu_10 + (mu_200 - mu_10) * (steps - 10) / 190


def _qwen_image(sigmas: np.ndarray, mu: float) -> np.ndarray:
    sigmas = _by_mu(sigmas, mu)
    return 1 - (1 - sigmas) * (1 - _QWEN_END) / (1 - sigmas[-1]) if len(sigmas) > 1 else sigmas


# fmt: off
PUBLISHED: Mapping[str, Sigmas] = {
    "flux": lambda steps, shape, shift: _by_mu(_even(steps), mu_of("flux", _tokens(shape))),
    "flux2": lambda steps, shape, shift: _by_mu(_even(steps), flux2_mu(math.prod(shape[1:]), steps)),
    "qwen_image": lambda steps, shape, shift: _qwen_image(_even(steps), mu_of("qwen_image", _tokens(shape))),
    # (the low end is shifted twice, as diffusers does)
    "sd3": lambda steps, shape, shift: _shifted(np.linspace(1, _shifted(np.array(_LEAST), shift), steps), shift),
    "sd3_dynamic": lambda steps, shape, shift: _by_mu(np.linspace(1, _LEAST, steps), mu_of("flux", _tokens(shape))),
}
# fmt: on
