"""Autoguidance (Karras et al. 2024): images and clips led away from what a weaker network says."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from mindspeed_mm_dit.errors import ConfigError
from tests.parts import models, name_of

TRIED = [model for model in models() if model.diffusion.model_id in ("flow_matching", "wan_flow_match_scheduler")]
TRIED = list({len(model.latent_shape): model for model in TRIED}.values())
"""One model of images, and one of clips."""


def network(framework, config, seed):
    from mindspeed_mm_dit.models.autoencoder import NoAutoencoder
    from mindspeed_mm_dit.models.composite import DiTModel

    model = framework.runtime.to_runtime_device(DiTModel(config, NoAutoencoder(config.ae)))
    rng, shapes = np.random.default_rng(seed), framework.runtime.shapes(model.predictor)
    weights = {name: rng.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}
    framework.runtime.load_arrays(model.predictor, weights)
    return model


@pytest.mark.parametrize("config", TRIED, ids=lambda config: name_of(config.predictor, config.diffusion))
def test_a_step_is_led_away_from_the_weaker_networks_by_the_formula(framework, config):
    """A step of Euler is linear in what is said: s of the network's and 1 - s of the weaker one's."""
    from mindspeed_mm_dit.sampling.generate import trajectory_states, with_defaults
    from mindspeed_mm_dit.sampling.load import CheckpointDescription
    from mindspeed_mm_dit.sampling.request import SampleRequest

    smaller = replace(config, predictor=replace(config.predictor, num_layers=1))
    ours, theirs, numbers = network(framework, config, 0), network(framework, smaller, 1), np.arange(2)
    given = config.predictor.conditions.examples(2)

    def end(model, scale=1.0, weaker=None, interval=(0.0, 1.0)):
        request = SampleRequest(sampler="euler", steps=1, guidance=scale, channels="all", interval=interval)
        if weaker is not None:
            other = SimpleNamespace(description=CheckpointDescription(smaller), predictor=weaker.predictor)
            request = replace(request, weaker=other)
        request = with_defaults(request, config)
        with framework.ops.no_grad():
            *_, last = trajectory_states(model, config, given, numbers, request, given)
        return framework.ops.numpy(last)

    expected = 2.5 * end(ours) - 1.5 * end(theirs)
    assert np.abs(end(ours) - end(theirs)).max() > 1e-2
    np.testing.assert_allclose(end(ours, 2.5, theirs), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(end(ours, 1.0, theirs), end(ours))
    np.testing.assert_array_equal(end(ours, 2.5, theirs, (0.0, 0.5)), end(ours))


def test_model_without_a_null_class_is_guided_by_a_weaker_one(framework):
    from mindspeed_mm_dit.sampling.generate import with_defaults
    from mindspeed_mm_dit.sampling.load import CheckpointDescription
    from mindspeed_mm_dit.sampling.request import SampleRequest

    config = next(m for m in models() if m.diffusion.model_id == "flow_matching" and m.predictor.num_classes)
    config = replace(config, predictor=replace(config.predictor, class_dropout_prob=0.0))
    with pytest.raises(ConfigError, match=r"--cfg-scale = 2\.0.*null class"):
        with_defaults(SampleRequest(sampler="euler", steps=1, guidance=2.0), config)
    weaker = SimpleNamespace(description=CheckpointDescription(config))
    request = SampleRequest(sampler="euler", steps=1, guidance=2.0, weaker=weaker)
    assert with_defaults(request, config).channels == "all"
