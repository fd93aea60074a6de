"""MeanFlow: draws by sample index, the target, and samplers that arrive where the average velocity is known."""

import math

import numpy as np
import pytest
import torch

from mindspeed_mm_dit.configs.diffusion import MeanFlowConfig
from mindspeed_mm_dit.configs.model import model_config_from_mapping
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.framework.pytorch import nn, ops
from mindspeed_mm_dit.objectives.mean_flow.objective import MEAN_FLOW, draws, draws_at
from mindspeed_mm_dit.objectives.mean_flow.process import MeanFlow

PLAIN = MeanFlowConfig(omega=1.0, kappa=0.0)
X, NOISE = (torch.from_numpy(a) for a in np.random.default_rng(0).standard_normal((2, 3, 2, 4, 4), np.float32))
LABELS = torch.tensor([0, 1, 2])  # (2 is the null class)


def test_an_interval_depends_on_seed_and_sample_index_alone():
    sample_indices = np.arange(400)
    whole = draws(PLAIN, 5, sample_indices, (1, 2, 2))
    part = draws(PLAIN, 5, sample_indices[37:90], (1, 2, 2))
    for name in whole:
        np.testing.assert_array_equal(whole[name][37:90], part[name])
    t, r = whole["times"].T
    assert (r <= t).all() and r.min() > 0 and t.max() < 1 and whole["times"].dtype == np.float32
    assert (r == t).mean() == pytest.approx(0.75, abs=0.08)  # 4 standard errors


def test_held_out_samples_are_judged_by_the_velocity():
    drawn = draws_at(PLAIN, np.array([0.2, 0.5, 0.9]), NOISE.numpy())
    times, noise, held_out = (torch.from_numpy(drawn[name]) for name in MeanFlow.draw_names)
    losses = MeanFlow(PLAIN).losses(lambda z, times, labels: 0 * z, 2, X, LABELS, times, noise, held_out)
    torch.testing.assert_close(losses, ((noise - X) ** 2).flatten(1).mean(1))


def test_derivative_is_along_the_point_and_the_later_time():
    """u = t^2 z - 3 r: along (v, 1, 0) it changes by 2 t z + t^2 v."""
    z, v, times = X, NOISE, torch.tensor([[0.5, 0.2], [0.9, 0.9], [0.3, 0.0]])
    over = lambda values: values[:, None, None, None]  # noqa: E731
    network = lambda z, times, labels: over(times[:, 0] ** 2) * z - over(3 * times[:, 1])  # noqa: E731
    t = over(times[:, 0])
    found = MeanFlow(PLAIN).derivative(network, z, v, times, LABELS)
    torch.testing.assert_close(found, 2 * t * z + t**2 * v)


def test_guidance_leaves_unlabelled_and_other_times_alone():
    config = MeanFlowConfig(omega=0.5, kappa=0.25, t_start=0.3, t_end=0.8)
    times = torch.tensor([[0.5, 0.2], [0.9, 0.2], [0.5, 0.2]])  # guided, too late, without a label
    network = lambda z, times, labels: torch.ones_like(z) * (10.0 + labels[:, None, None, None])  # noqa: E731
    v_g = MeanFlow(config).guided(network, X, NOISE, times, LABELS, unconditional=2)
    torch.testing.assert_close(v_g[0], 0.5 * NOISE[0] + 0.25 * 12 + 0.25 * 10)
    assert torch.equal(v_g[1:], NOISE[1:])


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_chain_of_any_length_arrives_at_the_data(steps):
    """Of one image x the way from z at t is straight: its velocity is (z - x) / t everywhere."""
    model_fn = lambda z, times, noise: (z - X) / times[:, 0][:, None, None, None]  # noqa: E731
    sampler = MEAN_FLOW.samplers["mean"]
    *_, last = sampler.trajectory(None, model_fn, NOISE, None, steps, sampler.options())
    torch.testing.assert_close(last, X)


def test_linear_layers_have_the_same_derivative_by_either_library(monkeypatch):
    layer, x, dx = torch.nn.Linear(5, 3), torch.randn(4, 5), torch.randn(4, 5)
    weight, bias = layer.weight.detach(), layer.bias.detach()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, dx)
        found = torch.autograd.forward_ad.unpack_dual(nn._OneDNN.apply(dual, weight, bias)).tangent
    torch.testing.assert_close(found, dx @ weight.T)


def model_json(diffusion, **predictor):
    sizes = {"model_id": "dit", "input_size": 8, "num_classes": 2, "in_channels": 1, "hidden_size": 16, "num_heads": 2,
             "num_layers": 1, "learn_sigma": False, **predictor}  # fmt: skip
    return {"ae": {"model_id": "pixel", "channels": 1}, "diffusion": {"model_id": diffusion}, "predictor": sizes}


@pytest.mark.parametrize(("content", "message"), [
    (model_json("mean_flow"), "takes one timestep, but MeanFlow needs two"),
    (model_json("flow_matching", h_embedder=True), "passes one timestep, but predictor .* needs two"),
    (model_json("mean_flow", h_embedder=True, class_dropout_prob=0.0), "the unconditional class"),
    (
        model_json("mean_flow", h_embedder=True, learn_sigma=True),
        "learns only a velocity for each of the 1 channels",
    ),
])  # fmt: skip
def test_networks_and_settings_of_no_mean_flow_are_refused(content, message):
    with pytest.raises(ConfigError, match=message):
        model_config_from_mapping(content, "model.json")
    for settings in ({"kappa": 1.0}, {"t_start": 0.8, "t_end": 0.2}, {"data_proportion": math.nan}):
        with pytest.raises(ConfigError, match="diffusion"):
            MeanFlowConfig(**settings)


@pytest.mark.parametrize("asked", [ops.without_gradient, lambda f, x: ops.derivative_along(f, (x,), (x,))])
def test_network_learns_after_a_call_without_gradient(asked):
    """PyTorch 2.7 keeps the weights that autocast casts, without a gradient too."""
    layer, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        asked(layer, x)
        layer(x).sum().backward()
    torch.testing.assert_close(layer.weight.grad, torch.full((4, 4), 2.0))
