"""What later recipes learn: the data (JiT), an angle (LightningDiT), times moved by the size of a latent (SD3, RAE)."""

import numpy as np
import pytest
import torch

from mindspeed_mm_dit.configs.diffusion import FlowMatchingConfig
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.objectives.flow.process import FlowMatching
from mindspeed_mm_dit.objectives.flow.samplers import ode_trajectory, sde_trajectory
from mindspeed_mm_dit.objectives.flow.sde import DiffusionCoefficient
from mindspeed_mm_dit.objectives.flow.timesteps import draws, sampling_times, shifted, training_times

X, NOISE, TRUE = (torch.from_numpy(a) for a in np.random.default_rng(0).standard_normal((3, 4, 2, 3, 3), np.float32))
T = np.array([0.1, 0.5, 0.9, 0.99], np.float32)


def process(**settings):
    return FlowMatching(FlowMatchingConfig(**settings))


def drawn(objective):
    return torch.from_numpy(T), NOISE, torch.from_numpy(objective.coefficients(T))


@pytest.mark.parametrize("noise_scale", [1.0, 2.0])
def test_loss_of_predicted_data_is_that_of_its_velocity(noise_scale):
    of_data, of_velocity = process(prediction_type="data", noise_scale=noise_scale), process(noise_scale=noise_scale)
    x_t = of_data.noised(X, *drawn(of_data))
    error = of_data.velocity(TRUE, x_t, T) - of_data.velocity(X, x_t, T)
    losses = of_data.loss(TRUE, X, x_t, *drawn(of_data))
    torch.testing.assert_close(losses, (error**2).flatten(1).mean(1))
    free = T < 0.95  # (where 1 - t is not held back, the velocity of the true data is that of the path)
    target = of_velocity.target(X, *drawn(of_velocity)[1:])
    torch.testing.assert_close(of_data.velocity(X, x_t, T)[free], target[free], rtol=1e-5, atol=1e-5)


def test_velocity_of_predicted_data_is_held_back_at_little_noise():
    held = process(prediction_type="data", t_eps=0.2)
    moved = held.velocity(TRUE, X, np.array([0.5, 0.8, 0.9, 1.0]))
    torch.testing.assert_close(moved, (TRUE - X) / torch.tensor([0.5, 0.2, 0.2, 0.2])[:, None, None, None])


@pytest.mark.parametrize("prediction", ["velocity", "noise", "score", "data"])
def test_noise_of_another_size_keeps_velocity_and_score_of_one_path(prediction):
    """Of a known x_t, whatever is predicted: the same velocity, and the score -noise / sigma."""
    objective, t = process(prediction_type=prediction, noise_scale=3.0), T[:3]
    x_t = objective.noised(X, *drawn(objective))[:3]
    sigma = torch.from_numpy(3.0 * (1 - t))[:, None, None, None]
    score, velocity = -NOISE[:3] / sigma, X[:3] - 3.0 * NOISE[:3]
    answer = {"velocity": velocity, "noise": NOISE[:3], "score": score, "data": X[:3]}[prediction]
    t64 = t.astype(np.float64)
    torch.testing.assert_close(objective.velocity(answer, x_t, t64), velocity, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(objective.score(answer, x_t, t64), score, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("prediction", ["velocity", "data"])
def test_chain_begins_with_noise_of_training_and_ends_at_data(prediction):
    """One image is all there is: what is asked answers with the data, or with the way there, and the chain arrives."""
    objective = process(prediction_type=prediction, noise_scale=2.0)

    def model_fn(x, t, share):
        return X if prediction == "data" else (X - x) / (1 - t)[:, None, None, None].clamp(min=1e-3)

    first, *_, last = ode_trajectory("euler", objective, model_fn, NOISE, 8)
    torch.testing.assert_close(first, 2 * NOISE + (X - 2 * NOISE) / 8)
    torch.testing.assert_close(last, X, rtol=1e-4, atol=1e-4)
    diffusion = DiffusionCoefficient(last_step="Tweedie")
    *_, walked = sde_trajectory(
        "sde-euler", objective, model_fn, NOISE, lambda step: torch.zeros_like(X), 50, diffusion
    )
    torch.testing.assert_close(walked, X, rtol=1e-3, atol=1e-3)


def test_the_last_step_of_heun_is_eulers_where_data_is_predicted():
    times = []

    def model_fn(x, t, share):
        times.append(float(t[0]))
        return torch.zeros_like(x)

    list(ode_trajectory("heun", process(prediction_type="data"), model_fn, NOISE, 2))
    assert times == [0, 0.5, 0.5]


def test_cosine_loss_is_the_angle_over_channels():
    plain, both = process(), process(cosine_loss=True)
    target = plain.target(X, *drawn(plain)[1:])
    for answer, angle in ((3.0 * target, 0.0), (-target, 2.0)):
        losses = both.loss(answer, X, X, *drawn(both)) - plain.loss(answer, X, X, *drawn(plain))
        torch.testing.assert_close(losses, torch.full((4,), angle), rtol=0, atol=1e-5)
    pixels = 1 - torch.nn.functional.cosine_similarity(TRUE, target, dim=1)  # (B, H, W)
    torch.testing.assert_close(both.cosine_distance(TRUE, X, *drawn(both)[1:]), pixels.mean((1, 2)))


def test_times_are_moved_by_the_size_of_the_latent():
    """RAE: sqrt(elements / 4096); four times as many tokens, twice the shift (SD3)."""
    config, sample_indices = FlowMatchingConfig(shift_base=4096), np.arange(200)
    assert config.shift_of((16, 16, 16)) == 1.0 and config.shift_of((16, 32, 32)) == 2.0
    plain = training_times(FlowMatchingConfig(), 3, sample_indices)
    np.testing.assert_allclose(training_times(config, 3, sample_indices, (16, 32, 32)), shifted(plain, 2.0), rtol=1e-5)
    np.testing.assert_array_equal(draws(config, 3, sample_indices, (16, 16, 16))["timesteps"], plain)
    np.testing.assert_allclose(sampling_times(config, 4, (16, 32, 32)), shifted(np.linspace(0, 1, 5), 2.0))
    # LightningDiT's timestep_shift 0.3 moves the chain, u -> 0.3 u / (1 + (0.3 - 1) u), and not what is trained at.
    config, u = FlowMatchingConfig(sample_shift=1 / 0.3), np.linspace(0, 1, 8)
    np.testing.assert_allclose(sampling_times(config, 7), 0.3 * u / (1 - 0.7 * u), atol=1e-15)
    np.testing.assert_array_equal(training_times(config, 3, sample_indices), plain)


@pytest.mark.parametrize(("settings", "message"), [
    ({"prediction_type": "data", "path": "gvp"}, "needs path 'linear'"),
    ({"prediction_type": "data", "loss_weight": "velocity"}, "has no effect on prediction_type 'data'"),
    ({"prediction_type": "noise", "cosine_loss": True}, "compares velocities"),
    ({"noise_scale": 0.0}, "diffusion.noise_scale = 0.0"),
    ({"t_eps": 0.0}, "diffusion.t_eps = 0.0"),
    ({"shift_base": 4096, "shift": 3.0}, "contradicts shift_base = 4096"),
    ({"sample_shift": 1e9}, "all times would be at one end"),
])  # fmt: skip
def test_settings_that_do_not_go_together_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        FlowMatchingConfig(**settings)


@pytest.mark.parametrize(
    ("path", "prediction"),
    [("linear", "velocity"), ("linear", "noise"), ("linear", "data"), ("gvp", "velocity"), ("gvp", "noise")],
)
def test_data_time_of_0_learns_and_draws_the_same(path, prediction):
    """``data_time`` 0 is another language of network and objective; losses, draws and chains do not change."""
    here, there = (process(path=path, prediction_type=prediction, data_time=time) for time in (1, 0))
    sign = -1 if prediction == "velocity" else 1
    drawn_here, drawn_there = (draws(each.config, 0, np.arange(4), (2, 3, 3)) for each in (here, there))
    np.testing.assert_allclose(drawn_there.pop("timesteps"), 1 - drawn_here.pop("timesteps"), rtol=1e-6)
    for name, drawn_value in drawn_here.items():
        np.testing.assert_array_equal(drawn_there[name], drawn_value)
    losses = [each.loss(by * TRUE, X, X, *drawn(each)) for each, by in ((here, 1), (there, sign))]
    assert torch.equal(*losses)

    def model_fn(x, t, noise):
        return torch.tanh(x) * (1 + t)[:, None, None, None]

    def ask_there(x, t, noise):
        np.testing.assert_allclose(t.numpy(), noise, atol=1e-6)  # guidance goes by the noise level
        return sign * model_fn(x, 1 - t, noise)

    def sde(each, by):
        return sde_trajectory("sde-euler", each, by, X, lambda step: NOISE, 5, DiffusionCoefficient("linear"))

    for integrate in (lambda each, by: ode_trajectory("heun", each, by, X, 5), sde):
        *_, one = integrate(here, model_fn)
        *_, other = integrate(there, ask_there)
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)  # (1 - t in float32, divided by what is small)
