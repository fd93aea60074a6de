"""Times of flow matching, where t = 0 is noise and 1 is data: training draws, published sampling tables, shifts.

No framework.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from mindspeed_mm_dit.configs.diffusion import FlowMatchingConfig, mu_of
from mindspeed_mm_dit.data.order import Stream, generator, normals
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.objectives.flow.path import DiffusionCoefficient, PathPoint, point_at
from mindspeed_mm_dit.objectives.registry import Arrays, check_steps

Sigmas = Callable[[int, tuple[int, ...], float], np.ndarray]
"""(steps, shape (C, H, W) of a latent, shift) -> noise levels (steps,) float64, before the last, 0."""
_MIN_SIGMA, _QWEN_END = 0.001, 0.02
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
    "sd3": lambda steps, shape, shift: _shifted(np.linspace(1, _shifted(np.array(_MIN_SIGMA), shift), steps), shift),
    "sd3_dynamic": lambda steps, shape, shift: _by_mu(np.linspace(1, _MIN_SIGMA, steps), mu_of("flux", _tokens(shape))),
}
# fmt: on


_MAX_GAIN = 1e6
"""Largest gain of a velocity in the drift; beyond it, the state vanishes in float32 rounding."""


def shifted(t: np.ndarray, shift: float) -> np.ndarray:
    """Move times towards noise with ``shift`` > 1, towards data with less (Esser et al. 2024, eq. 23); 0 and 1 stay.

    The paper's t is 1 - t here.
    """
    return t / (t + shift * (1 - t))


def logit_normal(z: np.ndarray, mean: float, std: float) -> np.ndarray:
    """Turn standard normal draws into times in (0, 1) whose logits are normal (Esser et al. 2024, eq. 19)."""
    return 1 / (1 + np.exp(-(mean + std * z)))


def heavy_tailed(u: np.ndarray, scale: float) -> np.ndarray:
    """Turn uniform draws into times with a mode at the middle and heavy tails (Esser et al. 2024, eq. 20)."""
    return u + scale * (np.cos(np.pi * u / 2) ** 2 - 1 + u)


def remaining_time(config: FlowMatchingConfig, t: np.ndarray) -> np.ndarray:
    """Return max(1 - t, t_eps), the divisor that turns predicted data minus x_t into a velocity, float64."""
    return np.maximum(1 - t.astype(np.float64), config.t_eps)


def network_time(config: FlowMatchingConfig, t: np.ndarray) -> np.ndarray:
    """Return the network's time input for times ``t``, float32."""
    return (t if config.data_time else 1 - t).astype(np.float32)


def training_times(
    config: FlowMatchingConfig, seed: int, sample_indices: np.ndarray, shape: tuple[int, ...] = ()
) -> np.ndarray:
    """Return the times for ``sample_indices`` (B,), float32 in the training interval.

    shape: that of a latent, (C, ...).
    """
    draws = [generator(seed, Stream.TIMESTEP, sample_index) for sample_index in sample_indices.tolist()]
    if config.timestep_sampling == "uniform":
        t = np.array([draw.random() for draw in draws])
    elif config.timestep_sampling == "mode":
        t = heavy_tailed(np.array([draw.random() for draw in draws]), config.mode_scale)
    else:
        z = np.array([draw.standard_normal() for draw in draws])
        t = logit_normal(z, config.logit_mean, config.logit_std)
    first, last = config.train_interval()
    return (first + (last - first) * shifted(t, config.shift_of(shape))).astype(np.float32)


def sampling_times(
    config: FlowMatchingConfig, steps: int, shape: tuple[int, ...] = (), last_step: float = 0.0
) -> np.ndarray:
    """Return the ``steps`` + 1 sampling times, float64: an even grid, then shifted.

    shape: that of a latent, (C, ...); the first and the last time do not depend on it.
    """
    if config.sample_schedule is not None:
        sigmas = PUBLISHED[config.sample_schedule](steps, shape, config.shift_of(shape, sampling=True))
        return 1 - np.append(sigmas, 0.0)
    first, last = config.sample_interval(last_step)
    shift = config.shift_of(shape, sampling=True)
    return first + (last - first) * shifted(np.linspace(0.0, 1.0, steps + 1), shift)


def sde_times(
    config: FlowMatchingConfig, steps: int, diffusion: DiffusionCoefficient, shape: tuple[int, ...] = ()
) -> np.ndarray:
    """Return the times of the even steps of an SDE sampler, which takes ``steps`` steps including the last one.

    shape: that of a latent, (C, ...); the first and the last time do not depend on it.

    Raises:
        ConfigError: there is no even step, there are too many, or the diffusion is infinite at the first time.
    """
    check_steps(config, steps, diffusion)
    if config.sample_schedule is not None:
        raise ConfigError(
            f"diffusion.sample_schedule = {config.sample_schedule!r} is for samplers without noise. Use --sampler "
            "euler, or drop it."
        )
    even = steps - (diffusion.last_step is not None)
    if even < 1:
        raise ConfigError(f"--steps = {steps} leaves no step before the last one. Use 2 or more.")
    times = sampling_times(config, even, shape, diffusion.last_step_size if diffusion.last_step else 0.0)
    if not np.isfinite(diffusion.at(times[:1], point_at(config, times[:1]))).all():
        raise ConfigError(
            f"--form = {diffusion.form} is infinite at t = {times[0]:g}, where sampling on path {config.path!r} "
            "begins. Use another form, such as sigma, or a model.json with diffusion.sample_eps 0.001."
        )
    return times


def check_heun_end(config: FlowMatchingConfig, times: np.ndarray, diffusion: DiffusionCoefficient) -> None:
    """Raise ConfigError if Heun's last step would need an infinite score, from a velocity at the end of the path."""
    end = times[-1:]
    point = point_at(config, end)
    with np.errstate(divide="ignore", invalid="ignore"):
        q = point.alpha / point.d_alpha
        gain = diffusion.at(end, point) * q / (point.sigma**2 - q * point.sigma * point.d_sigma)
    if config.prediction_type in ("velocity", "data") and not abs(gain[0]) < _MAX_GAIN:
        raise ConfigError(
            f"--last-step = {diffusion.last_step} does not go with sde-heun, which needs the score at t = {end[0]:g}, "
            f"where predicted {config.prediction_type} has none on path {config.path!r}. Use Mean, Tweedie or Euler, "
            "or --sampler sde-euler."
        )


_WEIGHTS = {
    "sigma_sqrt": lambda sigma: sigma**-2.0,
    "cosmap": lambda sigma: 2 / (np.pi * (1 - 2 * sigma + 2 * sigma**2)),
    "data": lambda sigma: sigma**2,
}
"""Weights of a velocity's loss by noise level, as in diffusers' training scripts (Esser et al. 2024)."""


def draws(config: FlowMatchingConfig, seed: int, sample_indices: np.ndarray, shape: tuple[int, ...]) -> Arrays:
    """Return timesteps (B,) as the network takes them, noise (B, *shape), and coefficients (B, 5), each float32."""
    times = training_times(config, seed, sample_indices, shape)
    return _batch(config, times, normals(seed, Stream.NOISE, sample_indices, shape))


def draws_at(config: FlowMatchingConfig, noise_levels: np.ndarray, noise: np.ndarray) -> Arrays:
    """Return the same for times at ``noise_levels`` (B,), from 0 (data) to 1 (noise)."""
    first, last = config.train_interval()
    return _batch(config, (last + (first - last) * noise_levels).astype(np.float32), noise)


def coefficients(config: FlowMatchingConfig, t: np.ndarray) -> np.ndarray:
    """Return alpha, sigma, alpha', sigma' and the weight of the loss at times ``t`` (B,), as (B, 5) float32."""
    point = point_at(config, t.astype(np.float64))
    columns = (point.alpha, point.sigma, point.d_alpha, point.d_sigma, _loss_weight(config, point, t))
    return np.stack(columns, 1).astype(np.float32)


def _batch(config: FlowMatchingConfig, t: np.ndarray, noise: np.ndarray) -> Arrays:
    return {"timesteps": network_time(config, t), "noise": noise, "coefficients": coefficients(config, t)}


def _loss_weight(config: FlowMatchingConfig, point: PathPoint, t: np.ndarray) -> np.ndarray:
    """Return the published weights: "velocity" makes the loss that of a velocity network, up to the path's ratio.

    For predicted data the loss is that of the velocity (data - x_t) / max(1 - t, t_eps).
    """
    if config.prediction_type == "data":
        return remaining_time(config, t) ** -2
    if config.loss_weight is None:
        return np.ones_like(point.alpha)
    if config.prediction_type == "velocity":
        return _WEIGHTS[config.loss_weight](point.sigma)
    if config.loss_weight == "velocity":
        return (point.score_gain / point.sigma) ** 2
    return point.score_gain / point.sigma**2
