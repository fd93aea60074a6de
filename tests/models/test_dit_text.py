"""A DiT that is steered by captions: which states reach which sample, and what it begins as."""

import dataclasses

import numpy as np
import pytest
import torch

from mindspeed_mm_dit.configs.condition import ClassLabel, PooledText, TextStates
from mindspeed_mm_dit.configs.dit import DiTConfig
from mindspeed_mm_dit.configs.model import model_config_from_mapping
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.models.dit import DiT
from mindspeed_mm_dit.models.init import initial_weights
from mindspeed_mm_dit.models.meta import parameters_of

LABELS = DiTConfig(input_size=8, num_classes=3, in_channels=3, hidden_size=48, num_layers=2, num_heads=4)
TEXT = dataclasses.replace(LABELS, num_classes=0, text_dim=10, text_length=5, pooled_dim=6)
STATES, POOLED = {"pooled_dim": None}, {"text_dim": None}
X, T, NUMBERS = torch.randn(2, 3, 8, 8, generator=torch.manual_seed(0)), torch.tensor([3, 900]), torch.tensor([0, 1])
CAPTIONS, WHOLE = torch.randn(2, 5, 10), torch.randn(2, 6)


def built(config, weights):
    network = DiT(config)
    runtime.load_arrays(network, weights)
    return network


def of_noise(config):
    """A network of which every weight is drawn, those that begin at zero too."""
    generator = np.random.default_rng(1)
    shapes = parameters_of(config).shapes()
    return built(config, {name: generator.standard_normal(shape, np.float32) * 0.1 for name, shape in shapes.items()})


@torch.no_grad()
def answer(network, *given):
    return network(X, T, *given)


@pytest.mark.parametrize("chosen", [STATES, POOLED, {}])
def test_each_sample_answers_to_its_own_caption(framework, chosen):
    config = dataclasses.replace(TEXT, **chosen)
    given = [array for name, array in (("text", CAPTIONS), ("pooled", WHOLE)) if name in config.conditions.names]
    network = of_noise(config)
    found, swapped = answer(network, *given), answer(network, *(array[[1, 0]] for array in given))
    first_changed = answer(network, *(torch.stack([array[1], array[1]]) for array in given))
    assert not torch.allclose(found, swapped, atol=1e-3)
    assert not torch.allclose(first_changed[0], found[0], atol=1e-3)
    torch.testing.assert_close(first_changed[1], found[1])


def test_what_a_caption_says_counts_and_not_the_place_of_a_state(framework):
    """The encoder tells a state its place; cross-attention is a sum over all of them, padding among them."""
    network = of_noise(dataclasses.replace(TEXT, **STATES))
    torch.testing.assert_close(answer(network, CAPTIONS), answer(network, CAPTIONS.flip(1)), rtol=1e-4, atol=1e-5)
    padded = torch.cat([CAPTIONS, torch.zeros(2, 3, 10)], 1)
    assert not torch.allclose(answer(network, padded), answer(network, CAPTIONS), atol=1e-4)


def test_a_dit_of_classes_that_is_given_captions_too_begins_as_it_was(framework):
    both = dataclasses.replace(LABELS, text_dim=10)
    weights = initial_weights(parameters_of(both), 0)
    for name in weights:  # what is zero at the start but for the attention to the text
        if "cross_attn" not in name and not weights[name].any():
            weights[name] = np.random.default_rng(2).standard_normal(weights[name].shape, np.float32) * 0.1
    plain = built(LABELS, {name: weights[name] for name in parameters_of(LABELS).shapes()})
    assert torch.equal(answer(built(both, weights), NUMBERS, CAPTIONS), answer(plain, NUMBERS))


def test_what_steers_it_is_said_in_the_order_of_its_arguments():
    both = dataclasses.replace(TEXT, num_classes=3, pooled_encoder=1)
    label, states, pooled = both.conditions
    assert label == ClassLabel(3, 0.1) and states == TextStates(5, 10)
    assert pooled == PooledText(6, encoder=1, shared_dropout_key="text") and both.conditions.names == (
        "labels", "text", "pooled",
    )  # fmt: skip
    assert both.conditions.coins() == {"labels": 0, "text": 1} and TEXT.conditions.items == ("caption",)
    assert dataclasses.replace(TEXT, **POOLED).conditions.coins() == {"pooled": 0}


@pytest.mark.parametrize("settings", [{}, STATES, POOLED, {"num_classes": 3}])
def test_shapes_tell_what_steers_it(settings):
    config = dataclasses.replace(TEXT, **settings)
    found = DiTConfig.of_shapes(parameters_of(config).shapes())
    assert (found.num_classes, found.text_dim, found.pooled_dim) == (
        config.num_classes, config.text_dim, config.pooled_dim,
    )  # fmt: skip
    assert parameters_of(found).shapes() == parameters_of(config).shapes()


def test_settings_that_make_no_network_are_named():
    for settings, message in (
        ({"text_dim": None, "pooled_dim": None}, "predictor.num_classes = 0"),
        ({"text_dim": 0}, "predictor.text_dim = 0"),
        ({"text_length": 0}, "predictor.text_length = 0"),
        ({"pooled_encoder": 2}, "predictor.pooled_encoder = 2"),
        ({"in_context_len": 2}, "predictor.in_context_len = 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            dataclasses.replace(TEXT, **settings)


def test_a_model_json_wants_a_text_encoder_for_texts_and_none_without(model_json):
    encoder = {"model_id": "bert", "from_pretrained": "nowhere"}
    of = lambda **sections: model_config_from_mapping({**model_json, **sections}, "model.json")  # noqa: E731
    with pytest.raises(ConfigError, match="predictor 'dit' is not conditioned on text"):
        of(text_encoder=encoder)
    predictor = model_json["predictor"] | {"text_dim": 16}
    with pytest.raises(ConfigError, match="this section is missing: predictor 'dit' is conditioned on text"):
        of(predictor=predictor)
    predictor |= {"pooled_dim": 16, "pooled_encoder": 1}
    with pytest.raises(ConfigError, match="has 1 encoders, but predictor 'dit' needs 2"):
        of(predictor=predictor, text_encoder=encoder)
    assert len(of(predictor=predictor, text_encoder=[encoder, encoder]).text_encoders) == 2
