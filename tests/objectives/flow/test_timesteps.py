"""Times of flow matching: functions of seed and position, in the interval of the path, by the law that is asked for."""

import itertools

import numpy as np
import pytest

from mindspeed_mm_dit.configs.diffusion import FlowMatchingConfig
from mindspeed_mm_dit.data.order import Stream, generator
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.objectives.flow.path import DiffusionCoefficient
from mindspeed_mm_dit.objectives.flow.timesteps import (
    PUBLISHED,
    check_heun_end,
    coefficients,
    heavy_tailed,
    logit_normal,
    sampling_times,
    sde_times,
    shifted,
    training_times,
)

SAMPLE_INDICES = np.arange(10_000)


def test_times_depend_on_seed_and_position_alone():
    config = FlowMatchingConfig()
    whole = training_times(config, 5, SAMPLE_INDICES[:100])
    np.testing.assert_array_equal(whole[40:], training_times(config, 5, SAMPLE_INDICES[40:100]))
    assert (whole != training_times(config, 6, SAMPLE_INDICES[:100])).all()
    assert whole.dtype == np.float32


@pytest.mark.parametrize(("config", "interval"), [
    (FlowMatchingConfig(), (0.0, 1.0)),
    (FlowMatchingConfig("gvp", "noise"), (1e-3, 1 - 1e-3)),
    (FlowMatchingConfig("vp"), (0.0, 1 - 1e-5)),
    (FlowMatchingConfig("linear", "score", train_eps=0.2), (0.2, 0.8)),
])  # fmt: skip
def test_uniform_times_fill_the_interval_of_the_path(config, interval):
    t = training_times(config, 0, SAMPLE_INDICES)
    assert np.float32(interval[0]) <= t.min() < interval[0] + 1e-3 and interval[1] - 1e-3 < t.max() <= interval[1]
    assert t.mean() == pytest.approx(0.5, abs=0.0145)  # 5 standard errors


def test_logit_normal_times_have_the_median_and_spread_of_their_law():
    t = training_times(
        FlowMatchingConfig(timestep_sampling="logit_normal", logit_mean=0.5, logit_std=0.8), 0, SAMPLE_INDICES
    )
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
    noisier = training_times(FlowMatchingConfig(shift=3.0), 0, SAMPLE_INDICES)
    np.testing.assert_allclose(
        noisier, shifted(training_times(FlowMatchingConfig(), 0, SAMPLE_INDICES), 3.0), rtol=1e-5
    )


def test_a_chain_leaves_room_for_its_last_step():
    np.testing.assert_allclose(sampling_times(FlowMatchingConfig(), 4), [0, 0.25, 0.5, 0.75, 1])
    score = FlowMatchingConfig("linear", "score", sample_eps=0.2)
    np.testing.assert_allclose(sampling_times(score, 4), np.linspace(0.2, 0.8, 5), atol=1e-12)
    np.testing.assert_allclose(sampling_times(FlowMatchingConfig(), 2, last_step=0.04), [0, 0.48, 0.96])
    np.testing.assert_allclose(sampling_times(FlowMatchingConfig("vp"), 1), [0, 0.999])
    assert (np.diff(np.diff(sampling_times(FlowMatchingConfig(shift=3.0), 10))) > 0).all()


def test_a_short_chain_of_qwen_image_has_its_last_noise_level_too():
    config, shape = FlowMatchingConfig(sample_schedule="qwen_image"), (16, 128, 128)
    for steps, times in ((1, [0, 1]), (2, [0, 0.98, 1])):
        np.testing.assert_allclose(sampling_times(config, steps, shape), times, atol=1e-12)


def test_heun_ends_where_the_score_is_known():
    """On the linear path the score is (t v - x) / (1 - t)."""
    for last in (DiffusionCoefficient(last_step_size=size) for size in (0.04, 0.5, 1e-5)):
        check_heun_end(FlowMatchingConfig(), sde_times(FlowMatchingConfig(), 4, last), last)
    none = DiffusionCoefficient(last_step=None)
    for config in (FlowMatchingConfig(), FlowMatchingConfig(prediction_type="data")):
        with pytest.raises(ConfigError, match="--last-step = None: sde-heun needs the score at t = 1, where"):
            check_heun_end(config, sde_times(config, 4, none), none)
    with pytest.raises(ConfigError, match=r"diffusion\.sample_schedule = "):
        sde_times(FlowMatchingConfig(sample_schedule=next(iter(PUBLISHED))), 4, DiffusionCoefficient())
    for prediction in ("noise", "score"):
        check_heun_end(FlowMatchingConfig(prediction_type=prediction), np.array([0.0, 1.0]), none)


def test_heavy_tailed_times_are_those_of_the_paper():
    u, scale = np.linspace(0, 1, 11), 1.29
    theirs = 1 - u - scale * (np.cos(np.pi * u / 2) ** 2 - 1 + u)  # Esser et al. 2024, eq. 20: 1 is noise
    np.testing.assert_allclose(heavy_tailed(u, scale), 1 - theirs, atol=1e-15)
    times = training_times(FlowMatchingConfig(timestep_sampling="mode"), 0, SAMPLE_INDICES)
    middle = ((times > 0.4) & (times < 0.6)).mean()
    assert times.min() >= 0 and times.max() <= 1 and middle > 0.3  # 0.2 of uniform ones
    plain = training_times(FlowMatchingConfig(), 0, SAMPLE_INDICES).astype(np.float64)
    np.testing.assert_allclose(times, heavy_tailed(plain, FlowMatchingConfig().mode_scale), atol=1e-6)


def test_training_times_are_shifted_by_the_tokens_of_an_image():
    config = FlowMatchingConfig(dynamic_shift="flux")
    small, large = (16, 32, 32), (16, 128, 128)  # 256 and 4,096 tokens
    assert [config.shift_of(shape) for shape in (small, large)] == pytest.approx([np.exp(0.5), np.exp(1.15)])
    assert FlowMatchingConfig(dynamic_shift="qwen_image").shift_of((16, 128, 256)) == pytest.approx(np.exp(0.9))
    plain = training_times(FlowMatchingConfig(), 0, SAMPLE_INDICES)
    np.testing.assert_allclose(
        training_times(config, 0, SAMPLE_INDICES, large), shifted(plain, np.exp(1.15)), atol=1e-6
    )


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
    ({"dynamic_shift": "flux", "shift": 3.0}, "diffusion.shift = 3.0: contradicts dynamic_shift = flux"),
    ({"prediction_type": "noise", "loss_weight": "cosmap"}, "'cosmap': is for predicted velocities"),
    ({"path": "gvp", "loss_weight": "cosmap"}, "'cosmap': needs path 'linear'"),
    ({"loss_weight": "sigma_sqrt", "train_eps": 0.0}, "diffusion.train_eps = 0: the loss is infinite"),
    ({"shift": 0.0}, "diffusion.shift = 0.0"),
    ({"shift": float("inf")}, "diffusion.shift = inf"),
    ({"logit_std": -1.0}, "diffusion.logit_std = -1.0"),
    ({"train_eps": 0.5}, "diffusion.train_eps = 0.5"),
    ({"sample_eps": -0.1}, "diffusion.sample_eps = -0.1"),
    ({"loss_weight": "likelihood"}, "diffusion.loss_weight = 'likelihood'"),
    ({"shift": 1e30}, "diffusion.shift = 1e"),
    ({"logit_mean": -1e9}, "diffusion.logit_mean = -1000000000.0"),
    ({"logit_std": 1e300}, "diffusion.logit_std = 1e"),
    ({"path": "vp", "train_eps": 0.0}, "diffusion.train_eps = 0: the loss is infinite"),
    ({"prediction_type": "noise", "loss_weight": "velocity", "train_eps": 1e-9}, "diffusion.train_eps = 1e-09"),
    ({"prediction_type": "noise", "sample_eps": 0.0}, "diffusion.sample_eps = 0: the velocity"),
    ({"path": "gvp", "prediction_type": "score", "sample_eps": 0.0}, "diffusion.sample_eps = 0: the velocity"),
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
