"""The float32 loss keeps the digits of the published formulas, which are computed here in the longest float there is.

The published likelihood subtracts two distribution functions; evaluated like that in float32 it is up to 16 % off on
the grid below, its gradients up to 90 %. Measured of ours, on either framework: 2e-7 of the norm on the grid and
5e-6 for the loss of a step, each timestep on its own. The bound is parity's 1e-5.
"""

import numpy as np
import pytest

from mindspeed_mm_dit.configs.diffusion import GaussianDiffusionConfig
from mindspeed_mm_dit.objectives.gaussian.schedule import Schedule
from mindspeed_mm_dit.tools.verify.table import relative_error
from tests.conftest import gradient

PAGE = np.sqrt(2 / np.longdouble(np.pi)), np.longdouble(0.044715)


def cdf(z):
    """Page's normal distribution function and its derivative."""
    scale, cubic = PAGE
    u = scale * (z + cubic * z**3)
    return (1 + np.tanh(u)) / 2, scale * (1 + 3 * cubic * z**2) / np.cosh(u) ** 2 / 2


def log_likelihood(x, deviation, log_scale):
    """The published likelihood, and its derivatives by the deviation and by the logarithm of the scale."""
    inverse_scale = np.exp(-log_scale)
    edges = [inverse_scale * (deviation + side / np.longdouble(255)) for side in (1, -1)]
    (upper, upper_slope), (lower, lower_slope) = map(cdf, edges)
    first, last = x < -0.999, x > 0.999
    held = np.select([first, last], [upper, 1 - lower], upper - lower)
    slopes = np.where(last, 0, upper_slope), np.where(first, 0, -lower_slope)
    floored, held = held < 1e-12, np.maximum(held, 1e-12)
    by_deviation = inverse_scale * (slopes[0] + slopes[1]) / held
    by_log_scale = -(slopes[0] * edges[0] + slopes[1] * edges[1]) / held
    return np.log(held), np.where(floored, 0, by_deviation), np.where(floored, 0, by_log_scale)


def grid():
    """Values inside and outside [-1, 1], up to 9 standard deviations from the mean, scales from 1/400 to 7."""
    x = np.array([-3, -1.01, -1, -0.9991, -0.9989, -0.5, 0, 0.004, 0.7, 0.9989, 0.9991, 1, 1.01, 3], np.float32)
    log_scale = np.linspace(-6, 2, 17, dtype=np.float32)
    z = np.linspace(-9, 9, 145, dtype=np.float32)
    x, log_scale, z = (np.ascontiguousarray(a) for a in np.broadcast_arrays(x[:, None], log_scale[:, None, None], z))
    return x, z * np.exp(log_scale), log_scale


def test_likelihood_and_gradients_keep_their_digits(framework):
    from mindspeed_mm_dit.objectives.gaussian.process import discretized_gaussian_log_likelihood

    inputs, ops = grid(), framework.ops
    x = ops.tensor(inputs[0])
    found = [
        ops.numpy(discretized_gaussian_log_likelihood(x, *map(ops.tensor, inputs[1:]))),
        *gradient(framework, lambda *rest: discretized_gaussian_log_likelihood(x, *rest), *inputs[1:]),
    ]
    wanted = log_likelihood(*(a.astype(np.longdouble) for a in inputs))
    for scale in range(17):  # each on its own: the gradients of a narrow Gaussian are hundreds of times those of a wide
        assert max(relative_error(a[scale], b[scale]) for a, b in zip(found, wanted)) < 1e-5
    assert (wanted[0] == np.log(np.longdouble(1e-12))).mean() > 0.1  # the floor, where no gradient is, is tried too


def published_loss(schedule, prediction_type, t, output, x_start, noise):
    """Return the published losses (B,) and the gradient of their sum by ``output``."""

    def at(name):
        return getattr(schedule, name).astype(np.longdouble)[t][:, None, None, None]

    x_t = at("sqrt_alphas_cumprod") * x_start + at("sqrt_one_minus_alphas_cumprod") * noise
    prediction, fraction = np.split(output, 2, 1)
    target, predicted_x_start = {
        "epsilon": (noise, at("sqrt_recip_alphas_cumprod") * x_t - at("sqrt_recipm1_alphas_cumprod") * prediction),
        "sample": (x_start, prediction),
        "v_prediction": (
            at("sqrt_alphas_cumprod") * noise - at("sqrt_one_minus_alphas_cumprod") * x_start,
            at("sqrt_alphas_cumprod") * x_t - at("sqrt_one_minus_alphas_cumprod") * prediction,
        ),
    }[prediction_type]
    means = [at("posterior_mean_coef1") * x + at("posterior_mean_coef2") * x_t for x in (x_start, predicted_x_start)]
    least, most = at("posterior_log_variance_clipped"), at("log_betas")
    log_variance = least + (fraction + 1) / 2 * (most - least)
    apart = (means[0] - means[1]) ** 2 * np.exp(-log_variance) + np.exp(least - log_variance)
    divergence, slope = (log_variance - least - 1 + apart) / 2, (1 - apart) / 2
    likelihood, _, by_log_scale = log_likelihood(x_start, x_start - means[1], log_variance / 2)
    first = t[:, None, None, None] == 0
    bound, slope = np.where(first, -likelihood, divergence), np.where(first, -by_log_scale / 2, slope)
    values = ((target - prediction) ** 2 + bound / np.log(np.longdouble(2))).mean((1, 2, 3))
    by_prediction, by_fraction = -2 * (target - prediction), slope * (most - least) / 2 / np.log(np.longdouble(2))
    return values, np.concatenate([by_prediction, by_fraction], 1) / prediction[0].size


@pytest.mark.parametrize("noise_schedule", ["linear", "squaredcos_cap_v2"])
@pytest.mark.parametrize("prediction_type", ["epsilon", "sample", "v_prediction"])
def test_losses_and_gradients_keep_their_digits_at_every_timestep(framework, prediction_type, noise_schedule):
    from mindspeed_mm_dit.objectives.gaussian.process import GaussianDiffusion

    ops, t, draw = framework.ops, np.arange(1000), np.random.default_rng(0)
    x_start, noise, error, fraction = draw.standard_normal((4, 1000, 4, 4, 4), np.float32)
    x_start[0, 0, 0] = [-1, 1, 0.5, 2]
    schedule = Schedule.create(noise_schedule, 1000)
    config = GaussianDiffusionConfig(1000, noise_schedule, prediction_type=prediction_type)
    diffusion = framework.runtime.to_runtime_device(GaussianDiffusion.from_config(config))
    given = [ops.tensor(a) for a in (x_start, t, noise)]
    # What the network is off by: half the noise. An x_0 further off lies in no bin at all at t = 0.
    scale = schedule.sqrt_one_minus_alphas_cumprod if prediction_type == "sample" else np.ones(1000)
    size = 0.5 * scale.astype(np.float32)[:, None, None, None]
    prediction = {"epsilon": noise, "sample": x_start, "v_prediction": ops.numpy(diffusion.velocity(*given))}
    output = np.concatenate([prediction[prediction_type] + size * error, fraction], 1)
    x_t = diffusion.add_noise(*given)

    def loss(output):
        return diffusion.loss(output, given[0], x_t, given[1], given[2])

    exact = (a.astype(np.longdouble) for a in (output, x_start, noise))
    values, slopes = published_loss(schedule, prediction_type, t, *exact)
    (found,) = gradient(framework, loss, output)
    for ours, wanted in ((ops.numpy(loss(ops.tensor(output))), values), (found, slopes)):
        assert max(relative_error(a, b) for a, b in zip(ours, wanted)) < 1e-5  # each timestep on its own
