"""A batch is its samples one by one: every objective and sampler, latents of any axes, any micro-batch."""

from __future__ import annotations

import random

import numpy as np
import pytest

from mindspeed_mm_dit.data.draws import Stream, normals
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.objectives.registry import draw_of, objective_of
from tests.conftest import FRAMEWORK
from tests.parts import CHANNELS, name_of, objectives

SHAPES = ((CHANNELS, 5), (CHANNELS, 4, 5), (CHANNELS, 2, 4, 5))
"""Latents of 2, 3 and 4 axes; with a batch of C a table of the wrong axes would multiply channels without a word."""
BATCHES = (1, 2, CHANNELS, CHANNELS + 1)
CLOSE = {"rtol": 2e-5, "atol": 2e-6}  # float32 sums of some tens of terms, whose order a batch may change
STEPS = 4
TRIED = objectives()
ONE_OF_EACH = {config.model_id: config for config in TRIED}
if FRAMEWORK == "mindspore":  # whose operators are slow to call: one form of each objective tells the axes
    TRIED = list(ONE_OF_EACH.values())
DRAWN = random.Random(0)
WALKS = [
    pytest.param(config, shape, id=f"{len(shape)}-{name_of(config)}")
    for config in TRIED
    for shape in (SHAPES if config is ONE_OF_EACH[config.model_id] else [DRAWN.choice(SHAPES)])
]
"""One form of each objective in every shape, the others in one of them."""
ON_PYTORCH = pytest.mark.skipif(FRAMEWORK != "pytorch", reason="the operators are those of the test above")


def batch_of(config, count, shape):
    """Latents (B, ...) and what the objective draws, by name."""
    return normals(1, Stream.NOISE, np.arange(count), shape), draw_of(config)(0, np.arange(count), shape)


def rows(arrays, row):
    return {name: array[row : row + 1] for name, array in arrays.items()}


@pytest.mark.parametrize("config", TRIED, ids=name_of)
@pytest.mark.parametrize("shape", SHAPES, ids=len)
def test_an_objective_noises_and_scores_each_sample_by_itself(framework, config, shape):
    process = framework.runtime.to_runtime_device(objective_of(config).build(config))
    if hasattr(process, "losses"):
        pytest.skip("asks the network itself: tried with networks in tests/test_cross_product.py")
    doubled = getattr(config, "variance_type", "") == "learned_range"

    def noised_and_loss(latents, draws):
        x = framework.ops.tensor(latents)
        given = [framework.ops.tensor(draws[name]) for name in process.draw_names]
        noised = process.noised(x, *given)
        output = framework.ops.cat([0.5 * noised, 0.1 * noised], 1) if doubled else 0.5 * noised
        return framework.ops.numpy(noised), framework.ops.numpy(process.loss(output, x, noised, *given))

    for count in BATCHES:
        latents, draws = batch_of(config, count, shape)
        together = noised_and_loss(latents, draws)
        alone = [noised_and_loss(latents[row : row + 1], rows(draws, row)) for row in range(count)]
        for found, wanted in zip(together, zip(*alone)):
            np.testing.assert_allclose(found, np.concatenate(wanted), **CLOSE)


@ON_PYTORCH
@pytest.mark.parametrize(("config", "shape"), WALKS)
def test_a_sampler_walks_with_each_sample_by_itself(framework, config, shape):
    """The network says as much as it is given, so that every state depends on all before it."""
    process = framework.runtime.to_runtime_device(objective_of(config).build(config))
    doubled = getattr(config, "variance_type", "") == "learned_range"
    ops = framework.ops

    def ask(x, t, noise):
        return ops.cat([x, ops.sigmoid(x)], 1) if doubled else x

    def walked(sampler, numbers):
        def noise_at(step):
            return ops.tensor(normals(2, Stream.SAMPLE_NOISE, numbers, shape, block=step))

        start = ops.tensor(normals(2, Stream.SAMPLE_START, numbers, shape))
        with ops.no_grad():
            *_, last = sampler.chain(process, ask, start, noise_at, STEPS, sampler.options())
        return ops.numpy(last)

    for sampler in objective_of(config).samplers.values():
        try:
            sampler.check(config, STEPS, sampler.options())
        except ConfigError:
            continue
        alone = np.concatenate([walked(sampler, np.array([number])) for number in range(CHANNELS)])
        np.testing.assert_allclose(walked(sampler, np.arange(CHANNELS)), alone, **CLOSE)
        assert np.isfinite(alone).all() and alone.shape == (CHANNELS, *shape)
