"""A batch is its samples one by one: every objective and sampler, latents of any axes; an objective from outside."""

import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest

from mindspeed_mm_dit.configs.model import model_config_from_mapping
from mindspeed_mm_dit.data.order import VALIDATION_START, Stream, normals
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.objectives.registry import (
    OBJECTIVES,
    objective_of,
    register_objective,
    training_draw,
    validation_draw,
)
from mindspeed_mm_dit.planning import Placement, memory
from tests.conftest import FRAMEWORK, run_config
from tests.external.objective import DENOISE
from tests.parts import CHANNELS, every_word_once, name_of, objectives

SHAPES = ((CHANNELS, 5), (CHANNELS, 4, 5), (CHANNELS, 2, 4, 5))
"""Latents of 2, 3 and 4 axes; with a batch of C a table of the wrong axes would multiply channels without a word."""
BATCHES = (1, 2, CHANNELS, CHANNELS + 1)
CLOSE = {"rtol": 2e-5, "atol": 2e-6}  # float32 sums of some tens of terms, whose order a batch may change
STEPS = 4
ONE_OF_EACH = {config.model_id: config for config in objectives()}
TRIED = objectives()
if FRAMEWORK == "mindspore":  # whose operators are slow to call: one form of each objective tells the axes
    TRIED = list(ONE_OF_EACH.values())
QUICK = every_word_once(TRIED)
DRAWN = random.Random(0)


def form(config, *values):
    """Return a case of ``config``, which `make test` has if it is the first to have some word."""
    return pytest.param(config, *values, id=name_of(config), marks=[] if config in QUICK else [pytest.mark.extended])


FORMS = [form(config) for config in TRIED]
WALKS = [form(config, SHAPES if config is ONE_OF_EACH[config.model_id] else [DRAWN.choice(SHAPES)]) for config in TRIED]
"""One form of each objective in every shape, the others in one of them."""


def batch_of(config, count, shape):
    """Latents (B, ...) and what the objective draws, by name."""
    return normals(1, Stream.NOISE, np.arange(count), shape), training_draw(config)(0, np.arange(count), shape)


def rows(arrays, row):
    return {name: array[row : row + 1] for name, array in arrays.items()}


def scores_itself(config):
    """Whether an objective calls the network itself: tried with networks in tests/test_cross_product.py."""
    return hasattr(objective_of(config).build(config), "losses")


@pytest.mark.parametrize("config", FORMS)
def test_objective_noises_and_scores_each_sample_by_itself(framework, config):
    if scores_itself(config):
        return
    process = framework.runtime.to_runtime_device(objective_of(config).build(config))
    doubled = getattr(config, "variance_type", "") == "learned_range"

    def noised_and_loss(latents, draws):
        x = framework.ops.tensor(latents)
        given = [framework.ops.tensor(draws[name]) for name in process.draw_names]
        noised = process.add_noise(x, *given)
        output = framework.ops.cat([0.5 * noised, 0.1 * noised], 1) if doubled else 0.5 * noised
        return framework.ops.numpy(noised), framework.ops.numpy(process.loss(output, x, noised, *given))

    for shape, count in itertools.product(SHAPES, BATCHES):
        latents, draws = batch_of(config, count, shape)
        together = noised_and_loss(latents, draws)
        alone = [noised_and_loss(latents[row : row + 1], rows(draws, row)) for row in range(count)]
        for found, wanted in zip(together, zip(*alone)):
            np.testing.assert_allclose(found, np.concatenate(wanted), **CLOSE)


@pytest.mark.pytorch  # the operators are those of the test above
@pytest.mark.parametrize(("config", "shapes"), WALKS)
def test_sampler_generates_each_sample_by_itself(framework, config, shapes):
    """The network says as much as it is given, so that every state depends on all before it."""
    process = framework.runtime.to_runtime_device(objective_of(config).build(config))
    doubled = getattr(config, "variance_type", "") == "learned_range"
    ops = framework.ops

    def model_fn(x, t, noise):
        return ops.cat([x, ops.sigmoid(x)], 1) if doubled else x

    def generated(sampler, numbers, shape):
        def noise_at(step):
            return ops.tensor(normals(2, Stream.SAMPLE_NOISE, numbers, shape, block=step))

        start = ops.tensor(normals(2, Stream.SAMPLE_START, numbers, shape))
        with ops.no_grad():
            *_, last = sampler.trajectory(process, model_fn, start, noise_at, STEPS, sampler.options())
        return ops.numpy(last)

    for sampler, shape in itertools.product(objective_of(config).samplers.values(), shapes):
        try:
            sampler.check(config, STEPS, sampler.options())
        except ConfigError:
            continue
        alone = np.concatenate([generated(sampler, np.array([number]), shape) for number in range(CHANNELS)])
        np.testing.assert_allclose(generated(sampler, np.arange(CHANNELS), shape), alone, **CLOSE)
        assert np.isfinite(alone).all() and alone.shape == (CHANNELS, *shape)


@pytest.fixture
def config(model_json):
    register_objective("denoise", DENOISE)
    yield model_config_from_mapping(model_json | {"diffusion": {"model_id": "denoise", "strength": 0.25}}, "model.json")
    del OBJECTIVES["denoise"]


def test_it_is_validated(framework, config, monkeypatch):
    """Nothing is learned yet: a network that says 0 misses the pixels by as much at every noise level."""
    from mindspeed_mm_dit.framework import runtime
    from mindspeed_mm_dit.models.composite import DiTModel
    from mindspeed_mm_dit.training.callbacks.registry import Run
    from mindspeed_mm_dit.training.callbacks.validation import validate
    from mindspeed_mm_dit.training.signals import StopRequest

    model = DiTModel(config)
    last = ("final_layer.linear.weight", "final_layer.linear.bias")
    shapes = runtime.shapes(model.predictor)
    runtime.load_arrays(model.predictor, {name: np.zeros(shapes[name], np.float32) for name in last})
    monkeypatch.setattr(runtime, "num_microbatches", lambda: 1)
    engine = SimpleNamespace(eval_step=lambda forward_step, own: model(**runtime.to_device(next(own))))
    pixels = np.random.default_rng(0).integers(0, 256, (8, 1, 8, 8), np.uint8)
    draws = validation_draw(config.diffusion)(0, VALIDATION_START + np.arange(8), config.latent_shape)
    batch = {"labels": np.arange(8), "pixels": pixels, **draws}
    found = validate(Run(run_config(eval_iters=2), engine, None, [batch, batch], None, StopRequest(), None))
    each = ((pixels / 127.5 - 1) ** 2).mean((1, 2, 3))
    assert found.mean == pytest.approx(each.mean(), rel=1e-6)
    places = {"0-25": [3, 7], "25-50": [1, 5], "50-75": [0, 4], "75-100": [2, 6]}
    assert found.quarters == pytest.approx({name: each[own].mean() for name, own in places.items()}, rel=1e-6)


def test_outside_objective_is_checked_and_planned(config, model_json):
    predictor = {**model_json["predictor"], "learn_sigma": True}
    content = model_json | {"diffusion": {"model_id": "denoise"}, "predictor": predictor}
    with pytest.raises(ConfigError, match="a denoiser has no variance"):
        model_config_from_mapping(content, "model.json")
    with pytest.raises(ConfigError, match="is registered already"):
        register_objective("denoise", DENOISE._replace(quick_sampler="other"))
    assert memory(config, Placement()).activations_per_sample > 0
