"""The tables, the draws, the loss and the chains of Wan's flow matching, against closed forms and diffusers."""

import dataclasses
import inspect

import numpy as np
import pytest

from mindspeed_mm_dit.configs.diffusion import WanFlowConfig
from mindspeed_mm_dit.configs.strict import from_mapping
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.objectives.registry import objective_of, sampler_options
from mindspeed_mm_dit.objectives.wan_flow.objective import (
    WAN_FLOW,
    batch,
    draws,
    draws_at,
    euler_sigmas,
    multistep_sigmas,
    training_table,
)
from mindspeed_mm_dit.tools.verify.table import relative_error

TUTORIAL = WanFlowConfig(shift=5.0, sigma_min=0.0, extra_one_step=True)
SHAPE = (4, 3, 2, 2)
START = np.random.default_rng(0).standard_normal((3, *SHAPE)).astype(np.float32)


def test_table_runs_from_noise_to_data_or_to_sigma_min():
    sigmas, weights = training_table(TUTORIAL)
    assert len(sigmas) == len(weights) == 1000
    assert sigmas[0] == 1 and weights[0] == 0 and weights.mean() == pytest.approx(1, abs=1e-12)
    assert sigmas[500] == pytest.approx(5 / 6)  # 5 / 2 / (1 + 4 / 2)
    assert sigmas[-1] == pytest.approx(0.005 / 1.004) and (np.diff(sigmas) < 0).all()
    assert abs(sigmas[weights.argmax()] - 0.5) < 2e-3
    config = dataclasses.replace(TUTORIAL, shift=1.0, sigma_min=0.25, sigma_max=0.75, extra_one_step=False)
    assert euler_sigmas(config, 3).tolist() == [0.75, 0.5, 0.25, 0]
    assert euler_sigmas(dataclasses.replace(config, extra_one_step=True), 2).tolist() == [0.75, 0.5, 0]


def test_draws_are_rows_of_the_table_by_position():
    config = dataclasses.replace(TUTORIAL, num_train_timesteps=10, min_timestep_boundary=0.2, max_timestep_boundary=0.7)
    found = draws(config, 3, np.arange(300), (1, 1, 1, 1))
    sigmas, weights = training_table(config)
    rows = [int(np.abs(10 * sigmas - t).argmin()) for t in found["timesteps"]]
    assert set(rows) == {2, 3, 4, 5, 6}
    np.testing.assert_array_equal(found["coefficients"], np.float32(np.stack([sigmas[rows], weights[rows]], 1)))
    again = draws(config, 3, np.arange(300)[100:102], (1, 1, 1, 1))
    for name, array in again.items():
        assert (array == found[name][100:102]).all(), name


@pytest.mark.parametrize(("high", "low"), [((0.875, 1.0), (0.0, 0.875)), ((875, 1000), (0, 875))])
def test_expert_is_never_given_a_time_of_the_other(high, low):
    whole, *experts = (
        draws(dataclasses.replace(TUTORIAL, timestep_window=own), 3, np.arange(300), (1, 1, 1, 1))
        for own in ((0.0, 1.0), high, low)
    )
    assert experts[0]["timesteps"].min() >= 875 > experts[1]["timesteps"].max()
    assert experts[0]["timesteps"].max() > 990 and experts[1]["timesteps"].min() < 50
    assert all((own["noise"] == whole["noise"]).all() for own in experts)
    levels = draws_at(dataclasses.replace(TUTORIAL, timestep_window=low), np.array([0.0, 1.0]), START[:2])
    assert levels["timesteps"][0] < 10 and 870 < levels["timesteps"][1] < 875


def test_one_time_a_micro_batch_is_that_of_its_first_sample():
    shared = dataclasses.replace(TUTORIAL, timestep_per="micro_batch")
    own, all_one = draws(TUTORIAL, 0, np.arange(5, 9), SHAPE), draws(shared, 0, np.arange(5, 9), SHAPE)
    assert len(set(own["timesteps"])) == 4 and set(all_one["timesteps"]) == {own["timesteps"][0]}
    assert (all_one["noise"] == own["noise"]).all()


def test_chosen_times_run_from_data_to_noise():
    found = draws_at(TUTORIAL, np.array([0.0, 0.5, 1.0]), START)
    sigmas = training_table(TUTORIAL).sigmas
    np.testing.assert_allclose(found["timesteps"], 1000 * sigmas[[999, 500, 0]], rtol=1e-6)
    assert found["noise"] is START and {array.dtype.name for array in found.values()} == {"float32"}


def test_a_perfect_velocity_has_no_loss_and_the_weight_is_the_rows(framework):
    ops, config = framework.ops, TUTORIAL
    process = objective_of(config).build(config)
    x = np.random.default_rng(1).standard_normal(START.shape).astype(np.float32)
    drawn = batch(config, np.array([1, 500, 999]), START)
    given = [ops.tensor(drawn[name]) for name in process.draw_names]
    noised = ops.numpy(process.add_noise(ops.tensor(x), *given))
    sigma = drawn["coefficients"][:, 0].reshape(3, 1, 1, 1, 1)
    np.testing.assert_allclose(noised, (1 - sigma) * x + sigma * START, rtol=1e-5, atol=1e-6)
    losses = [
        ops.numpy(process.loss(ops.tensor(START - x + off), ops.tensor(x), ops.tensor(noised), *given))
        for off in (0, 2)
    ]
    assert losses[0].max() < 1e-10
    np.testing.assert_allclose(losses[1], 4 * drawn["coefficients"][:, 1], rtol=1e-5)


def test_frames_that_are_known_do_not_count(framework):
    """Half of the frames are the data's: an error of 2 in the others, and of 7 in these, is a mean square of 4."""
    ops, process = framework.ops, objective_of(TUTORIAL).build(TUTORIAL)
    drawn = batch(TUTORIAL, np.array([1, 500, 999]), START)
    given = [ops.tensor(drawn[name]) for name in process.draw_names]
    known = np.zeros((3, 1, *START.shape[2:]), np.float32)
    known[..., ::2] = 1
    x = ops.tensor(np.zeros_like(START))
    found = process.loss(ops.tensor(START + np.where(known, np.float32(7), 2)), x, x, *given, ops.tensor(known))
    np.testing.assert_allclose(ops.numpy(found), 4 * drawn["coefficients"][:, 1], rtol=1e-5)


def gaussian_velocity(spread):
    """The velocity of data N(0, spread^2), under which every x_t is the noise times the standard deviation there."""

    def model_fn(x, timesteps, sigma):
        variance = ((1 - sigma) * spread) ** 2 + sigma**2
        slope = (sigma - (1 - sigma) * spread**2) / variance
        return x * float(slope[0])

    return model_fn


def end_of(framework, name, steps, config=TUTORIAL, model_fn=None):
    objective = objective_of(config)
    options = sampler_options(config, name, {})
    trajectory = objective.samplers[name].trajectory
    start, model_fn = framework.ops.tensor(START), model_fn or gaussian_velocity(2.0)
    *_, last = trajectory(objective.build(config), model_fn, start, None, steps, options)
    return framework.ops.numpy(last)


def test_euler_is_of_first_order(framework):
    found = np.array([relative_error(end_of(framework, "euler", n), 2 * START) for n in (20, 40, 80)])
    np.testing.assert_allclose(np.log2(found[:-1] / found[1:]), 1, atol=0.15)


def test_unipc_is_of_second_order_and_better_than_euler(framework):
    """Its grid begins one training time below pure noise: the end it comes to is that of the same start from there."""
    config = dataclasses.replace(TUTORIAL, shift=1.0, num_train_timesteps=100)
    sigma = multistep_sigmas(config, 1)[0]
    wanted = 2 * START / np.sqrt((2 * (1 - sigma)) ** 2 + sigma**2)
    found = np.array([relative_error(end_of(framework, "unipc", n, config), wanted) for n in (10, 20, 40)])
    assert (np.log2(found[:-1] / found[1:]) > 1.7).all()
    assert found[0] < 0.2 * relative_error(end_of(framework, "euler", 10, config), 2 * START)


def test_one_step_ends_in_the_data_that_the_network_sees(framework):
    for name in ("euler", "unipc"):
        sigma = 1.0 if name == "euler" else multistep_sigmas(TUTORIAL, 1)[0]
        found = end_of(framework, name, 1, model_fn=lambda x, t, sigma: 0.25 * x)
        np.testing.assert_allclose(found, START - sigma * 0.25 * START, rtol=1e-5, atol=1e-6)


@pytest.mark.pytorch  # diffusers is written for it
@pytest.mark.parametrize("steps", [1, 2, 3, 10, 50])
@pytest.mark.parametrize("shift", [3.0, 5.0])
def test_unipc_walks_as_diffusers_does(framework, steps, shift):
    import torch
    from diffusers import UniPCMultistepScheduler

    config = dataclasses.replace(TUTORIAL, shift=shift)
    theirs = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)
    if "sigmas" in inspect.signature(theirs.set_timesteps).parameters:
        theirs.set_timesteps(sigmas=np.linspace(0.999, 0, steps + 1)[:-1])  # (since 0.37 it begins at 1 by itself)
    else:
        theirs.set_timesteps(steps)
    np.testing.assert_allclose(theirs.sigmas.numpy(), multistep_sigmas(config, steps), atol=1e-7)
    x, told = torch.from_numpy(START), []

    def curved(x):
        return torch.sin(3 * x) + 0.3 * x

    def model_fn(x, t, sigma):
        told.append(t[0].item())
        return curved(x)

    for t in theirs.timesteps:
        x = theirs.step(curved(x), t, x).prev_sample
    assert relative_error(end_of(framework, "unipc", steps, config, model_fn), x.numpy()) < 1e-5
    assert [int(t + 1e-3) for t in told] == theirs.timesteps.tolist()


def test_the_network_is_told_the_times_it_was_trained_at(framework):
    told = []
    end_of(framework, "euler", 4, model_fn=lambda x, t, sigma: told.append((framework.ops.numpy(t), sigma)) or 0 * x)
    for (t, sigma), wanted in zip(told, euler_sigmas(TUTORIAL, 4), strict=False):
        np.testing.assert_allclose(t, np.full(3, 1000 * wanted), rtol=1e-6)
        np.testing.assert_allclose(sigma, np.full(3, wanted))


@pytest.mark.parametrize(("wrong", "words"), [
    ({"num_train_timesteps": 2}, "num_train_timesteps = 2"),
    ({"shift": 0.0}, "diffusion.shift = 0.0"),
    ({"sigma_min": 1.0}, "sigma_min = 1.0, sigma_max = 1.0"),
    ({"min_timestep_boundary": 0.5, "max_timestep_boundary": 0.5}, "leave none of 1000 timesteps"),
    ({"min_timestep_boundary": 0.5, "max_timestep_boundary": 1.5}, "0 <= min < max <= 1"),
    ({"timestep_window": [0.5, 0.5]}, "timestep_window"),
    ({"timestep_window": [0.5]}, "must be a list of 2"),
    ({"timestep_window": [0.99999, 0.999999]}, "leaves none of 1000 timesteps"),
    ({"timestep_window": [0.0, 0.5], "max_timestep_boundary": 0.3}, "leaves none of 1000 timesteps"),
    ({"timestep_per": "batch"}, "timestep_per = 'batch' must be 'sample' or 'micro_batch'"),
    ({"inverse_timesteps": True}, "unknown key"),
])  # fmt: skip
def test_settings_that_make_no_table_are_refused(wrong, words):
    TUTORIAL.check_output(16, 16)
    with pytest.raises(ConfigError, match="32 output channels"):
        TUTORIAL.check_output(16, 32)
    with pytest.raises(ConfigError, match=words):
        from_mapping(WanFlowConfig, wrong, "model.json: diffusion")


def test_samplers_walk_the_chains_of_their_names(framework):
    from mindspeed_mm_dit.objectives.wan_flow import process as wan_flow

    built, ops, ends = WAN_FLOW.build(WanFlowConfig()), framework.ops, []

    def model_fn(x, t, sigmas):
        return x * x

    for name, trajectory in (("euler", wan_flow.euler_trajectory), ("unipc", wan_flow.unipc_trajectory)):
        sampler = WAN_FLOW.samplers[name]
        wanted = [ops.numpy(x) for x in trajectory(built, model_fn, ops.tensor(START), 5)]
        walked = sampler.trajectory(built, model_fn, ops.tensor(START), None, 5, sampler.options())
        found = [ops.numpy(x) for x in walked]
        assert len(found) == 5
        np.testing.assert_array_equal(found, wanted)
        ends.append(found[-1])
    assert np.abs(ends[0] - ends[1]).max() > 1e-3
