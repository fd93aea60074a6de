"""The Gaussian diffusion process: noising, reading a network's output, the loss, and the samplers.

DDPM (Ho et al. 2020; Nichol & Dhariwal 2021), DDIM (Song et al. 2021) and DPM-Solver++ (Lu et al. 2022).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mindspeed_mm_dit.framework import nn, ops, runtime
from mindspeed_mm_dit.objectives.gaussian.schedule import Schedule

if TYPE_CHECKING:
    from mindspeed_mm_dit.configs.diffusion import GaussianDiffusionConfig


Tensor = Any  # a tensor of the active framework


class Prediction(NamedTuple):
    """The distribution p(x_{t-1} | x_t) predicted by a network; each field is (B, C, ...)."""

    mean: Tensor
    """Mean of x_{t-1}."""
    log_variance: Tensor
    """Logarithm of its variance."""
    x_start: Tensor
    """The predicted clean latents x_0."""


TABLES = (
    "alphas_cumprod",
    "alphas_cumprod_prev",
    "fixed_large_log_variance",
    "log_betas",
    "posterior_log_variance_clipped",
    "posterior_mean_coef1",
    "posterior_mean_coef2",
    "sqrt_alphas_cumprod",
    "sqrt_one_minus_alphas_cumprod",
    "sqrt_recip_alphas_cumprod",
    "sqrt_recipm1_alphas_cumprod",
)
"""Tables of the schedule that are looked up by timestep."""

BITS_PER_NAT = 1 / math.log(2.0)
SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
PAGE_CUBIC = 0.044715


class GaussianDiffusion(nn.Module):
    """A schedule, the quantity that the network predicts, and its variance (Ho et al. 2020; Nichol & Dhariwal 2021).

    Timesteps ``t`` are indices into the schedule's S steps, (B,) int. Tensors named x, noise or output are (B, C, ...)
    with any axes after the channels. All arithmetic is float32.
    """

    draw_names = ("timesteps", "noise")

    def __init__(self, schedule: Schedule, prediction_type: str, variance_type: str) -> None:
        super().__init__()
        self.schedule = schedule
        self.prediction_type = prediction_type
        self.variance_type = variance_type
        for name in TABLES:
            table = getattr(schedule, name)
            nn.set_constant(self, name, table.shape, functools.partial(table.astype, "float32"))

    @classmethod
    def from_config(cls, config: GaussianDiffusionConfig) -> GaussianDiffusion:
        """Build the process that model.json describes."""
        schedule = Schedule.create(config.noise_schedule, config.num_train_timesteps)
        return cls(schedule, config.prediction_type, config.variance_type)

    def respaced(self, steps: Any) -> GaussianDiffusion:
        """Return the same process over only the timesteps ``steps``, on the runtime's device."""
        process = GaussianDiffusion(self.schedule.respaced(steps), self.prediction_type, self.variance_type)
        return runtime.to_runtime_device(process)

    def at(self, name: str, t: Tensor, x: Tensor) -> Tensor:
        """Look up the schedule's table ``name`` at ``t``, as a tensor that multiplies the samples of ``x`` (B, ...)."""
        return ops.reshape(ops.take(getattr(self, name), t), (x.shape[0],) + (1,) * (len(x.shape) - 1))

    def add_noise(self, x_start: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """Noise clean latents to step ``t`` (Ho et al. 2020, eq. 4).

        x_start, noise: (B, C, ...) float32, unit-variance latents. Returns x_t, (B, C, ...).
        """
        data_coef, noise_coef = self._data_and_noise_coefs(t, x_start)
        return data_coef * x_start + noise_coef * noise

    def velocity(self, x_start: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """Return v = sqrt(alpha-bar) noise - sqrt(1 - alpha-bar) x_0 (Salimans & Ho 2022, appendix D)."""
        data_coef, noise_coef = self._data_and_noise_coefs(t, x_start)
        return data_coef * noise - noise_coef * x_start

    def _data_and_noise_coefs(self, t: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the coefficients of data and noise in x_t: sqrt(alpha-bar) and sqrt(1 - alpha-bar)."""
        return self.at("sqrt_alphas_cumprod", t, x), self.at("sqrt_one_minus_alphas_cumprod", t, x)

    def x_start_from_epsilon(self, x_t: Tensor, t: Tensor, epsilon: Tensor) -> Tensor:
        """Solve eq. 4 of Ho et al. 2020 for x_0."""
        gain, slope = self._inverse_coefs(t, x_t)
        return gain * x_t - slope * epsilon

    def epsilon_from_x_start(self, x_t: Tensor, t: Tensor, x_start: Tensor) -> Tensor:
        """Solve eq. 4 of Ho et al. 2020 for the noise."""
        gain, slope = self._inverse_coefs(t, x_t)
        return (gain * x_t - x_start) / slope

    def _inverse_coefs(self, t: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.at("sqrt_recip_alphas_cumprod", t, x), self.at("sqrt_recipm1_alphas_cumprod", t, x)

    def posterior_mean(self, x_start: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        """Return the mean of q(x_{t-1} | x_t, x_0) (Ho et al. 2020, eq. 7)."""
        return self.at("posterior_mean_coef1", t, x_t) * x_start + self.at("posterior_mean_coef2", t, x_t) * x_t

    def split_output(self, output: Tensor) -> tuple[Tensor, Tensor | None]:
        """Split a network's output into the predicted quantity and, if learned, the variance fraction."""
        if self.variance_type != "learned_range":
            return output, None
        prediction, fraction = ops.chunk(output, 2, 1)
        return prediction, fraction

    def predict(self, output: Tensor, x_t: Tensor, t: Tensor, clip: float | None = None) -> Prediction:
        """Return the prediction of a network's output at x_t.

        output: (B, C or 2C, ...) float32; ``clip``: bound on |x_0|, None for no bound (as published).
        """
        prediction, fraction = self.split_output(output)
        x_start = self._x_start(prediction, x_t, t)
        if clip is not None:
            x_start = ops.clamp(x_start, -clip, clip)
        return Prediction(self.posterior_mean(x_start, x_t, t), self._log_variance(fraction, x_t, t), x_start)

    def _x_start(self, prediction: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        if self.prediction_type == "sample":
            return prediction
        if self.prediction_type == "epsilon":
            return self.x_start_from_epsilon(x_t, t, prediction)
        data_coef, noise_coef = self._data_and_noise_coefs(t, x_t)
        return data_coef * x_t - noise_coef * prediction

    def _log_variance(self, fraction: Tensor | None, x_t: Tensor, t: Tensor) -> Tensor:
        """Interpolate between the two bounds on the log variance (Nichol & Dhariwal 2021, eq. 15)."""
        if fraction is None:
            fixed = (
                "posterior_log_variance_clipped" if self.variance_type == "fixed_small" else "fixed_large_log_variance"
            )
            return self.at(fixed, t, x_t) + 0.0 * x_t
        weight = (fraction + 1) / 2
        largest, smallest = self.at("log_betas", t, x_t), self.at("posterior_log_variance_clipped", t, x_t)
        return weight * largest + (1 - weight) * smallest

    # The losses return plain tensors: MindSpore's compiler runs named tuples in the interpreter, without gradients.

    def loss(self, output: Tensor, x_start: Tensor, x_t: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """Return the training loss, (B,): the simple loss plus, with a learned variance, the variational bound.

        Ho et al. 2020, eq. 14, plus Nichol & Dhariwal 2021, eq. 16, with the published DiT's weight of 1.
        output: (B, C or 2C, ...) float32, the network's output at (x_t, t).
        """
        mse = self.simple_loss(output, x_start, t, noise)
        if self.variance_type != "learned_range":
            return mse
        return mse + self.variational_bound(output, x_start, x_t, t, noise)

    def simple_loss(self, output: Tensor, x_start: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """Return the mean squared error of the predicted quantity, (B,) (Ho et al. 2020, eq. 14)."""
        error = self._error(output, x_start, t, noise)
        return ops.mean_per_sample(error * error)

    def variational_bound(self, output: Tensor, x_start: Tensor, x_t: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """Return one term of the variational bound, (B,) bits per dimension (Ho et al. 2020, eqs. 5 and 13).

        It trains only the variance: no gradient reaches the mean (Nichol & Dhariwal 2021, section 3.1).
        """
        _, fraction = self.split_output(output)
        predicted_log_variance = self._log_variance(fraction, x_t, t)
        true_log_variance = self.at("posterior_log_variance_clipped", t, x_t)
        # At t = 0 the deviation is about 1e-2 of the means, and their difference in float32 would keep only five
        # digits of it. So compute it from the error. The true mean there is x_0 itself.
        error = ops.stop_gradient(self._error(output, x_start, t, noise))
        deviation = self.at("posterior_mean_coef1", t, x_t) * self._x_start_error(error, t)
        divergence = gaussian_kl(deviation, true_log_variance, predicted_log_variance)
        likelihood = discretized_gaussian_log_likelihood(x_start, deviation, 0.5 * predicted_log_variance)
        return BITS_PER_NAT * ops.where(t == 0, -ops.mean_per_sample(likelihood), ops.mean_per_sample(divergence))

    def _error(self, output: Tensor, x_start: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """Return the target minus the prediction, (B, C, ...)."""
        return self._target(x_start, t, noise) - self.split_output(output)[0]

    def _x_start_error(self, error: Tensor, t: Tensor) -> Tensor:
        """Convert the ``error`` of the predicted quantity to the error of x_0: true minus predicted."""
        if self.prediction_type == "sample":
            return error
        if self.prediction_type == "epsilon":
            return -self.at("sqrt_recipm1_alphas_cumprod", t, error) * error
        return -self.at("sqrt_one_minus_alphas_cumprod", t, error) * error

    def _target(self, x_start: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        if self.prediction_type == "epsilon":
            return noise
        if self.prediction_type == "sample":
            return x_start
        return self.velocity(x_start, t, noise)


def gaussian_kl(difference: Tensor, log_variance1: Tensor, log_variance2: Tensor) -> Tensor:
    """Return the KL divergence of two diagonal Gaussians whose means differ by ``difference``, elementwise, in nats."""
    log_ratio = log_variance1 - log_variance2
    return 0.5 * (ops.expm1(log_ratio) - log_ratio + difference * difference * ops.exp(-log_variance2))


def discretized_gaussian_log_likelihood(x: Tensor, deviation: Tensor, log_scale: Tensor) -> Tensor:
    """Return the log-likelihood of 8-bit values x in [-1, 1] for a Gaussian cut into 256 bins (Ho et al. 2020, eq. 13).

    Elementwise, in nats; ``deviation`` is x minus the Gaussian's mean. The two outer bins reach to infinity. A
    likelihood below 1e-12 counts as 1e-12.

    A sigmoid approximates the normal distribution function (Page 1977). The probability between two edges, sigmoid(b) -
    sigmoid(a), is computed as sigmoid(b) sigmoid(-a) (1 - exp(a - b)), which avoids subtracting close numbers.
    """
    inverse_scale = ops.exp(-log_scale)
    middle, half_width = inverse_scale * deviation, inverse_scale / 255.0
    below_upper_edge = ops.sigmoid(_cdf_logit(middle + half_width))
    above_lower_edge = ops.sigmoid(-_cdf_logit(middle - half_width))
    squares = 3.0 * middle * middle + half_width * half_width
    gap = 4.0 * SQRT_2_OVER_PI * half_width * (1.0 + PAGE_CUBIC * squares)  # b - a
    between = below_upper_edge * above_lower_edge * -ops.expm1(-gap)
    likelihood = ops.where(x < -0.999, below_upper_edge, ops.where(x > 0.999, above_lower_edge, between))
    return ops.log(ops.clamp(likelihood, 1e-12, None))


def _cdf_logit(z: Tensor) -> Tensor:
    """Return the logit of the normal distribution function at ``z``, in Page's approximation."""
    return 2.0 * SQRT_2_OVER_PI * z * (1.0 + PAGE_CUBIC * z * z)


Predict = Callable[[Tensor, Tensor, int], Tensor]
"""(x_t (B, C, ...), training timestep (B,), the same as an int) -> output (B, C or 2C, ...) float32."""
NoiseAt = Callable[[int], Tensor]
"""Sampling step, counted from the start -> (B, C, ...) standard normal."""


def ddpm(
    diffusion: GaussianDiffusion, predict: Predict, x: Tensor, noise_at: NoiseAt, clip: float | None = None
) -> Iterator[Tensor]:
    """Ancestral sampling (Ho et al. 2020, algorithm 2), with the network's variance if it is learned."""
    for step, index in enumerate(reversed(range(len(diffusion.schedule)))):
        t, output = _call_model(diffusion, predict, x, index)
        predicted = diffusion.predict(output, x, t, clip)
        x = predicted.mean
        if index > 0:
            x = x + ops.exp(0.5 * predicted.log_variance) * noise_at(step)
        yield x


def ddim(
    diffusion: GaussianDiffusion, predict: Predict, x: Tensor, noise_at: NoiseAt, clip: float | None = None
) -> Iterator[Tensor]:
    """Deterministic sampling (Song et al. 2021, eq. 12 with sigma = 0); ``noise_at`` is not used."""
    for index in reversed(range(len(diffusion.schedule))):
        t, output = _call_model(diffusion, predict, x, index)
        x_start = diffusion.predict(output, x, t, clip).x_start
        epsilon = diffusion.epsilon_from_x_start(x, t, x_start)
        signal = diffusion.at("alphas_cumprod_prev", t, x)
        x = x_start * signal**0.5 + (1 - signal) ** 0.5 * epsilon
        yield x


def dpm_solver_pp(
    diffusion: GaussianDiffusion, predict: Predict, x: Tensor, noise_at: NoiseAt, clip: float | None = None
) -> Iterator[Tensor]:
    """Deterministic, second order, one network call per step: DPM-Solver++(2M) (Lu et al. 2022, algorithm 2).

    The first and the last step are of first order: the first has no step before it, and the last ends without
    noise, where the half log-SNR is infinite. ``noise_at`` is not used.
    """
    x_before: Tensor = None
    h_before = 0.0
    for index in reversed(range(len(diffusion.schedule))):
        t, output = _call_model(diffusion, predict, x, index)
        x_start = diffusion.predict(output, x, t, clip).x_start
        keep, gain, h = diffusion.schedule.solution_weights(index)
        slope = 0.0 if x_before is None or index == 0 else 0.5 * h / h_before
        towards = x_start if slope == 0.0 else (1 + slope) * x_start - slope * x_before
        x = keep * x + gain * towards
        x_before, h_before = x_start, h
        yield x


def _call_model(diffusion: GaussianDiffusion, predict: Predict, x: Tensor, index: int) -> tuple[Tensor, Tensor]:
    """Return (index into the schedule, network output) for a whole batch at one sampling step."""
    timestep = int(diffusion.schedule.timestep_map[index])
    t_index, t_network = (ops.tensor(np.full(x.shape[0], value, np.int64)) for value in (index, timestep))
    return t_index, ops.to_float32(predict(x, t_network, timestep))
