"""Paths from noise to data, and what a network's answer says of velocity and score along them."""

import numpy as np
import pytest

from mindspeed_mm_dit.configs.diffusion import FlowMatchingConfig
from mindspeed_mm_dit.objectives.flow.path import PATHS
from mindspeed_mm_dit.tools.verify.table import relative_error

T = np.linspace(0.02, 0.98, 25)
PREDICTIONS = ("velocity", "noise", "score")


@pytest.mark.parametrize("name", PATHS)
def test_path_leads_from_noise_to_data(name):
    """For data N(0, 4) the velocity is the conditional mean of alpha' x_1 + sigma' x_0, in closed form."""
    with np.errstate(divide="raise"):  # whose end is without a warning of the infinite speed of VP's noise
        noise, data = PATHS[name](np.array([0.0])), PATHS[name](np.array([1.0]))
    assert noise.alpha[0] == pytest.approx(np.exp(-5.025) if name == "vp" else 0)
    assert (data.alpha[0], data.sigma[0] < 1e-15) == (1.0, True)
    assert noise.sigma[0] == pytest.approx(1.0, abs=3e-5)
    h = 1e-6  # central differences are off by about h^2 and 1e-16 / h
    point, before, after = PATHS[name](T), PATHS[name](T - h), PATHS[name](T + h)
    np.testing.assert_allclose(point.d_alpha, (after.alpha - before.alpha) / (2 * h), rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(point.d_sigma, (after.sigma - before.sigma) / (2 * h), rtol=1e-7, atol=1e-9)
    x, variance = 0.7, 4 * point.alpha**2 + point.sigma**2
    velocity = (4 * point.alpha * point.d_alpha + point.sigma * point.d_sigma) / variance * x
    np.testing.assert_allclose(velocity, point.alpha_ratio * x + point.score_gain * (-x / variance), rtol=1e-12)


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("name", PATHS)
def test_velocity_and_score_are_the_same_for_every_prediction(framework, name, prediction):
    from mindspeed_mm_dit.objectives.flow.process import FlowMatching

    ops, draw = framework.ops, np.random.default_rng(0)
    data, noise = draw.standard_normal((2, len(T), 3, 2, 2))
    wide = (len(T), 1, 1, 1)
    point = PATHS[name](T)
    alpha, sigma = point.alpha.reshape(wide), point.sigma.reshape(wide)
    truth = {
        "velocity": point.d_alpha.reshape(wide) * data + point.d_sigma.reshape(wide) * noise,
        "noise": noise,
        "score": -noise / sigma,
    }
    process = FlowMatching(FlowMatchingConfig(name, prediction))
    x = ops.tensor((alpha * data + sigma * noise).astype(np.float32))
    unused = np.full_like(noise, np.nan)  # a learned variance is not looked at
    output = ops.tensor(np.concatenate([truth[prediction], unused], 1).astype(np.float32))
    # float32 inputs; a velocity becomes a score by a difference of numbers 30 times its size near the data
    assert relative_error(ops.numpy(process.velocity(output, x, T)), truth["velocity"]) < 1e-5
    assert relative_error(ops.numpy(process.score(output, x, T)), truth["score"]) < 2e-5


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_loss_is_the_weighted_square_of_the_error(framework, prediction):
    from mindspeed_mm_dit.objectives.flow.process import FlowMatching

    ops, draw, t = framework.ops, np.random.default_rng(0), np.array([0.2, 0.6])
    data, noise = draw.standard_normal((2, 2, 3, 2, 2, 2)).astype(np.float32)  # latents of any rank
    weight = None if prediction == "velocity" else "likelihood"
    process = FlowMatching(FlowMatchingConfig("gvp", prediction, weight))
    coefficients = process.coefficients(t)
    point, wide = PATHS["gvp"](t), (2, 1, 1, 1, 1)
    right = {
        "velocity": point.d_alpha.reshape(wide) * data + point.d_sigma.reshape(wide) * noise,
        "noise": noise,
        "score": -noise / point.sigma.reshape(wide),
    }[prediction]
    x_t = np.nan * data  # the loss needs none of it
    given = [ops.tensor(array) for array in (data, x_t, t, noise, coefficients)]
    scale = point.sigma**2 if prediction == "score" else 1.0  # its error is scaled by sigma
    wanted = 0.01 * scale * (point.score_gain / point.sigma**2 if weight else 1.0)
    losses = [ops.numpy(process.loss(ops.tensor((right + off).astype(np.float32)), *given)) for off in (0.0, 0.1)]
    np.testing.assert_allclose(losses[0], 0.0, atol=1e-12)
    np.testing.assert_allclose(losses[1], wanted * np.ones(2), rtol=1e-5)
