"""Times of flow matching, functions of seed and position; what later recipes (JiT, LightningDiT, SD3, RAE) learn."""

import itertools

import numpy as np
import pytest
import torch

from mindspeed_mm_dit.configs.diffusion import FlowMatchingConfig
from mindspeed_mm_dit.data.order import Stream, generator
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.objectives.flow.path import DiffusionCoefficient
from mindspeed_mm_dit.objectives.flow.process import FlowMatching
from mindspeed_mm_dit.objectives.flow.samplers import ode_trajectory, sde_trajectory
from mindspeed_mm_dit.objectives.flow.timesteps import (
    PUBLISHED,
    check_heun_end,
    coefficients,
    draws,
    heavy_tailed,
    logit_normal,
    sampling_times,
    sde_times,
    shifted,
    training_times,
)

INDICES = np.arange(10_000)


def test_times_depend_on_seed_and_position_alone():
    config = FlowMatchingConfig()
    whole = training_times(config, 5, INDICES[:100])
    np.testing.assert_array_equal(whole[40:], training_times(config, 5, INDICES[40:100]))
    assert (whole != training_times(config, 6, INDICES[:100])).all()
    assert whole.dtype == np.float32


@pytest.mark.parametrize(("config", "interval"), [
    (FlowMatchingConfig(), (0.0, 1.0)),
    (FlowMatchingConfig("gvp", "noise"), (1e-3, 1 - 1e-3)),
    (FlowMatchingConfig("vp"), (0.0, 1 - 1e-5)),
    (FlowMatchingConfig("linear", "score", train_eps=0.2), (0.2, 0.8)),
])  # fmt: skip
def test_uniform_times_fill_the_interval_of_the_path(config, interval):
    t = training_times(config, 0, INDICES)
    assert np.float32(interval[0]) <= t.min() < interval[0] + 1e-3 and interval[1] - 1e-3 < t.max() <= interval[1]
    assert t.mean() == pytest.approx(0.5, abs=0.0145)  # 5 standard errors


def test_logit_normal_times_have_the_median_and_spread_of_their_law():
    t = training_times(FlowMatchingConfig(timestep_sampling="logit_normal", logit_mean=0.5, logit_std=0.8), 0, INDICES)
    logits = np.log(t / (1 - t))
    assert (logits.mean(), logits.std()) == (pytest.approx(0.5, abs=0.04), pytest.approx(0.8, abs=0.03))
    z = generator(0, Stream.TIMESTEP, 7).standard_normal()
    assert t[7] == pytest.approx(1 / (1 + np.exp(-(0.5 + 0.8 * z))), rel=1e-6)
    assert logit_normal(np.array([0.0]), 0.0, 1.0) == [0.5]


def test_shift_above_one_moves_times_towards_noise():
    t = np.linspace(0, 1, 11)
    assert (shifted(t, 3.0)[1:-1] < t[1:-1]).all() and (shifted(t, 0.5)[1:-1] > t[1:-1]).all()
    np.testing.assert_array_equal(shifted(t, 3.0)[[0, -1]], [0.0, 1.0])
    np.testing.assert_allclose(shifted(shifted(t, 3.0), 1 / 3.0), t, atol=1e-15)
    noisier = training_times(FlowMatchingConfig(shift=3.0), 0, INDICES)
    np.testing.assert_allclose(noisier, shifted(training_times(FlowMatchingConfig(), 0, INDICES), 3.0), rtol=1e-5)


def test_chains_leave_room_for_their_last_step():
    np.testing.assert_allclose(sampling_times(FlowMatchingConfig(), 4), [0, 0.25, 0.5, 0.75, 1])
    score = FlowMatchingConfig("linear", "score", sample_eps=0.2)
    np.testing.assert_allclose(sampling_times(score, 4), np.linspace(0.2, 0.8, 5), atol=1e-12)
    np.testing.assert_allclose(sampling_times(FlowMatchingConfig(), 2, last_step=0.04), [0, 0.48, 0.96])
    np.testing.assert_allclose(sampling_times(FlowMatchingConfig("vp"), 1), [0, 0.999])
    assert (np.diff(np.diff(sampling_times(FlowMatchingConfig(shift=3.0), 10))) > 0).all()
    config, shape = FlowMatchingConfig(sample_schedule="qwen_image"), (16, 128, 128)
    for steps, times in ((1, [0, 1]), (2, [0, 0.98, 1])):
        np.testing.assert_allclose(sampling_times(config, steps, shape), times, atol=1e-12)


def test_heun_ends_where_the_score_is_known():
    """On the linear path the score is (t v - x) / (1 - t)."""
    for last in (DiffusionCoefficient(last_step_size=size) for size in (0.04, 0.5, 1e-5)):
        check_heun_end(FlowMatchingConfig(), sde_times(FlowMatchingConfig(), 4, last), last)
    none = DiffusionCoefficient(last_step=None)
    for config in (FlowMatchingConfig(), FlowMatchingConfig(prediction_type="data")):
        with pytest.raises(ConfigError, match=r"--last-step = None.*sde-heun.*the score at t = 1"):
            check_heun_end(config, sde_times(config, 4, none), none)
    with pytest.raises(ConfigError, match=r"diffusion\.sample_schedule = "):
        sde_times(FlowMatchingConfig(sample_schedule=next(iter(PUBLISHED))), 4, DiffusionCoefficient())
    for prediction in ("noise", "score"):
        check_heun_end(FlowMatchingConfig(prediction_type=prediction), np.array([0.0, 1.0]), none)


def test_heavy_tailed_times_are_those_of_the_paper():
    u, scale = np.linspace(0, 1, 11), 1.29
    theirs = 1 - u - scale * (np.cos(np.pi * u / 2) ** 2 - 1 + u)  # Esser et al. 2024, eq. 20: 1 is noise
    np.testing.assert_allclose(heavy_tailed(u, scale), 1 - theirs, atol=1e-15)
    times = training_times(FlowMatchingConfig(timestep_sampling="mode"), 0, INDICES)
    middle = ((times > 0.4) & (times < 0.6)).mean()
    assert times.min() >= 0 and times.max() <= 1 and middle > 0.3  # 0.2 of uniform ones
    plain = training_times(FlowMatchingConfig(), 0, INDICES).astype(np.float64)
    np.testing.assert_allclose(times, heavy_tailed(plain, FlowMatchingConfig().mode_scale), atol=1e-6)


def test_training_times_are_shifted_by_the_tokens_of_an_image():
    config = FlowMatchingConfig(dynamic_shift="flux")
    small, large = (16, 32, 32), (16, 128, 128)  # 256 and 4,096 tokens
    assert [config.shift_of(shape) for shape in (small, large)] == pytest.approx([np.exp(0.5), np.exp(1.15)])
    assert FlowMatchingConfig(dynamic_shift="qwen_image").shift_of((16, 128, 256)) == pytest.approx(np.exp(0.9))
    plain = training_times(FlowMatchingConfig(), 0, INDICES)
    np.testing.assert_allclose(training_times(config, 0, INDICES, large), shifted(plain, np.exp(1.15)), atol=1e-6)


@pytest.mark.parametrize(
    ("weight", "of"),
    [("sigma_sqrt", lambda s: s**-2), ("cosmap", lambda s: 2 / (np.pi * (1 - 2 * s + 2 * s * s))), ("data", np.square)],
)
def test_losses_of_velocities_are_weighted_as_in_diffusers(weight, of):
    config = FlowMatchingConfig(loss_weight=weight, data_time=0)
    sigma = np.array([0.25, 0.5, 0.875])
    np.testing.assert_allclose(coefficients(config, 1 - sigma)[:, -1], of(sigma), rtol=1e-6)
    assert config.eps[0] == (1e-3 if weight == "sigma_sqrt" else 0)  # the lowest of diffusers' 1,000 noise levels


def test_losses_of_noise_weigh_as_the_velocities_they_imply():
    config, t = FlowMatchingConfig(prediction_type="noise", loss_weight="velocity"), np.array([0.25, 0.5, 0.875])
    np.testing.assert_allclose(coefficients(config, t)[:, -1], t**-2, rtol=1e-6)  # v = x / t - noise / t


@pytest.mark.parametrize(("settings", "named"), [
    ({"mode_scale": 2.0}, "diffusion.mode_scale = 2.0"),
    ({"dynamic_shift": "flux", "shift": 3.0}, "diffusion.shift = 3.0.*contradicts dynamic_shift = flux"),
    ({"prediction_type": "noise", "loss_weight": "cosmap"}, "'cosmap' is for predicted velocities"),
    ({"path": "gvp", "loss_weight": "cosmap"}, "'cosmap' needs path 'linear'"),
    ({"loss_weight": "sigma_sqrt", "train_eps": 0.0}, "diffusion.train_eps = 0 .*the loss infinite"),
    ({"shift": 0.0}, "diffusion.shift = 0.0"),
    ({"shift": float("inf")}, "diffusion.shift = inf"),
    ({"logit_std": -1.0}, "diffusion.logit_std = -1.0"),
    ({"train_eps": 0.5}, "diffusion.train_eps = 0.5"),
    ({"sample_eps": -0.1}, "diffusion.sample_eps = -0.1"),
    ({"loss_weight": "likelihood"}, "diffusion.loss_weight = 'likelihood'"),
    ({"logit_mean": -1e9}, "diffusion.logit_mean = -1000000000.0"),
    ({"logit_std": 1e300}, "diffusion.logit_std = 1e"),
    ({"path": "vp", "train_eps": 0.0}, "diffusion.train_eps = 0 .*the loss infinite"),
    ({"prediction_type": "noise", "loss_weight": "velocity", "train_eps": 1e-9}, "diffusion.train_eps = 1e-09"),
    ({"prediction_type": "noise", "sample_eps": 0.0}, "diffusion.sample_eps = 0.*the velocity"),
    ({"prediction_type": "data", "path": "gvp"}, "needs path 'linear'"),
    ({"prediction_type": "data", "loss_weight": "velocity"}, "has no effect on prediction_type 'data'"),
    ({"prediction_type": "noise", "cosine_loss": True}, "compares velocities"),
    ({"noise_scale": 0.0}, "diffusion.noise_scale = 0.0"),
    ({"t_eps": 0.0}, "diffusion.t_eps = 0.0"),
    ({"shift_base": 4096, "shift": 3.0}, "contradicts shift_base = 4096"),
    ({"sample_shift": 1e9}, "all times would be at one end"),
    ({"sample_schedule": "flux3"}, "Did you mean 'flux'"),
    ({"path": "gvp", "sample_schedule": "flux"}, "needs path 'linear'"),
])  # fmt: skip
def test_impossible_settings_are_refused(settings, named):
    with pytest.raises(ConfigError, match=named):
        FlowMatchingConfig(**settings)


@pytest.mark.parametrize("path", ["linear", "gvp", "vp"])
@pytest.mark.parametrize(
    ("prediction", "weight"),
    [("velocity", None), *itertools.product(["noise", "score"], [None, "velocity", "likelihood"])],
)
def test_what_is_let_pass_has_a_finite_loss_at_the_very_ends(path, prediction, weight):
    for eps in (None, 0.0, 1e-6):
        try:
            config = FlowMatchingConfig(path, prediction, weight, train_eps=eps)
        except ConfigError:
            continue
        needed = coefficients(config, np.array(config.train_interval(), np.float32))
        needed = needed if prediction == "velocity" else needed[:, [0, 1, 4]]  # (the others are of the velocity)
        assert np.isfinite(needed).all(), eps


X, NOISE, TRUE = (torch.from_numpy(a) for a in np.random.default_rng(0).standard_normal((3, 4, 2, 3, 3), np.float32))
T = np.array([0.1, 0.5, 0.9, 0.99], np.float32)


def process(**settings):
    return FlowMatching(FlowMatchingConfig(**settings))


def drawn(objective):
    return torch.from_numpy(T), NOISE, torch.from_numpy(objective.coefficients(T))


@pytest.mark.parametrize("noise_scale", [1.0, 2.0])
def test_loss_of_predicted_data_is_that_of_its_velocity(noise_scale):
    of_data, of_velocity = process(prediction_type="data", noise_scale=noise_scale), process(noise_scale=noise_scale)
    x_t = of_data.add_noise(X, *drawn(of_data))
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
    x_t = objective.add_noise(X, *drawn(objective))[:3]
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
    *_, walked = sde_trajectory("sde-euler", objective, model_fn, NOISE, lambda step: 0 * X, 50, diffusion)
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
