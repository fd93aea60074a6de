"""An objective from outside the package: named in a model.json, with no change anywhere else."""

from types import SimpleNamespace

import numpy as np
import pytest

from mindspeed_mm_dit.configs.model import model_config_from_mapping
from mindspeed_mm_dit.data.order import VALIDATION_START
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.objectives.registry import OBJECTIVES, register_objective, validation_draw
from mindspeed_mm_dit.planning import Placement, memory
from tests.conftest import run_config
from tests.external.objective import DENOISE


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
    assert memory(config, Placement()).activations_per_image > 0
