"""Adapters in networks: what they add, what is trained, and networks of other packages."""

import numpy as np
import pytest

from mindspeed_mm_dit.checkpoint.lora import adapter_from_arrays
from mindspeed_mm_dit.configs.model import model_config_from_mapping
from mindspeed_mm_dit.configs.tuning import LoraSpec, Tuning
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.models.meta import parameters_of, with_tuning
from mindspeed_mm_dit.models.registry import network_of
from mindspeed_mm_dit.objectives.registry import training_draw
from tests.models.test_outside_predictor import FLOW, PREDICTOR, joined  # noqa: F401

RANK, ALPHA = 3, 12.0


def losses(config, weights):
    from mindspeed_mm_dit.framework import optim, runtime
    from mindspeed_mm_dit.models.composite import DiTModel

    model = DiTModel(config)
    runtime.load_arrays(model.predictor, weights)
    draw = training_draw(config.diffusion)
    given = config.predictor.conditions.examples(4) | draw(0, np.arange(4), config.latent_shape)
    latents = np.random.default_rng(0).standard_normal((4, *config.latent_shape), np.float32)
    batch = runtime.to_device({"latents": latents, **{name: given[name] for name in model.loss_names}})
    return optim.gradients(model.predictor, lambda: model.losses(*batch.values()))


@pytest.fixture(params=["residual", "dit"])
def config(request, joined, model_json):  # noqa: F811
    section = PREDICTOR if request.param == "residual" else model_json["predictor"]
    return model_config_from_mapping({**model_json, "predictor": section, "diffusion": FLOW}, "model.json")


@pytest.fixture
def targets(config):
    return ("stages.{*}.layer", "first") if config.predictor.model_id == "residual" else ("qkv", "fc2")


def drawn(config, seed):
    draw = np.random.default_rng(seed)
    return {
        name: draw.standard_normal(shape).astype(np.float32) * 0.1
        for name, shape in parameters_of(config).shapes().items()
    }


def test_an_adapter_that_begins_changes_nothing_and_one_that_learned_is_its_merged_weights(framework, config, targets):
    from mindspeed_mm_dit.models.composite import DiTModel

    adapted = with_tuning(config, Tuning(targets, RANK, ALPHA))
    base, adapted_starter = drawn(config, 1), DiTModel(adapted).initial_weights(7)
    new = {name: array for name, array in adapted_starter.items() if name not in base}
    before = losses(config, base)[0]
    assert np.array_equal(losses(adapted, base | new)[0], before)
    learned = {name: array for name, array in drawn(adapted, 2).items() if name in new}
    found = losses(adapted, base | learned)[0]
    assert not np.allclose(found, before, rtol=1e-3)
    merged = adapter_from_arrays(learned, ALPHA, "here").merged(base)
    np.testing.assert_allclose(found, losses(config, merged)[0], rtol=2e-6)


def test_only_adapters_have_gradients_and_those_of_the_merged_weights_chain_to_them(framework, config, targets):
    adapted = with_tuning(config, Tuning(targets, RANK, ALPHA))
    base, arrays = drawn(config, 1), drawn(adapted, 2)
    learned = {name: array for name, array in arrays.items() if name not in base}
    gradients = losses(adapted, base | learned)[1]
    assert set(gradients) == set(learned)
    of_weights = losses(config, adapter_from_arrays(learned, ALPHA, "here").merged(base))[1]
    for name in (n.removesuffix(".lora_A.weight") for n in learned if ".lora_A." in n):
        of_weight, (down, up) = of_weights[f"{name}.weight"], (learned[f"{name}.lora_{m}.weight"] for m in "AB")
        scale = ALPHA / RANK
        np.testing.assert_allclose(gradients[f"{name}.lora_B.weight"], scale * of_weight @ down.T, rtol=1e-3, atol=2e-6)
        np.testing.assert_allclose(gradients[f"{name}.lora_A.weight"], scale * up.T @ of_weight, rtol=1e-3, atol=2e-6)


def test_frozen_modules_have_no_gradient_and_the_others_keep_theirs(framework, config):
    section = "stages.{0}" if config.predictor.model_id == "residual" else "blocks.{0}"
    base, frozen = drawn(config, 1), with_tuning(config, Tuning(freeze=(section,)))
    whole, part = losses(config, base)[1], losses(frozen, base)[1]
    assert whole.keys() - part.keys() == {n for n in whole if n.startswith(section.replace("{0}", "0"))}
    for name, gradient in part.items():
        np.testing.assert_allclose(gradient, whole[name], rtol=1e-5, atol=1e-7)


def test_what_is_no_linear_layer_of_the_framework_cannot_have_an_adapter(framework, config):
    from mindspeed_mm_dit.models.layers import add_lora

    network = network_of(config.predictor)
    for name, words in (("nothing.there", "absent"), ("", f"is a {type(network).__name__}")):
        with pytest.raises(ConfigError, match=words):
            add_lora(network, {name: LoraSpec(2, 1.0)})
