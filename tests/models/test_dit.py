import dataclasses
import hashlib

import numpy as np
import pytest
import torch

from mindspeed_mm_dit.checkpoint.formats import read_weights
from mindspeed_mm_dit.configs.condition import ClassLabel, PooledText, TextStates
from mindspeed_mm_dit.configs.dit import PRESETS, DiTConfig
from mindspeed_mm_dit.configs.model import model_config_from_mapping
from mindspeed_mm_dit.configs.predictor import ONES, XAVIER_UNIFORM, ZEROS, Normal, ParameterSpec, ParameterSpecs
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.models.composite import DiTModel
from mindspeed_mm_dit.models.dit import DiT
from mindspeed_mm_dit.models.init import initial_value, initial_weights
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.models.positions import rotary_tables_2d
from mindspeed_mm_dit.models.weight_adapters import weight_converter_of
from tests.conftest import GOLDEN

TINY = DiTConfig(input_size=8, num_classes=10, in_channels=4, patch_size=2, hidden_size=64, num_layers=2, num_heads=4)

FIRST_DRAWN = "4f0cab7e364ae5d3c628c891043280513d109db935b40306fb21917bc22ac859"


def initialised(config: DiTConfig, seed: int = 0) -> DiT:
    model = DiT(config)
    runtime.load_arrays(model, initial_weights(parameters_of(config), seed))
    return model


def test_weights_have_published_names_and_their_first_bits():
    published = read_weights(GOLDEN / "dit_tiny_p2.pt")
    assert {n: tuple(v.shape) for n, v in DiT(TINY).state_dict().items()} == {n: a.shape for n, a in published.items()}
    # A digest of all that is trained, as it was first drawn.
    weights = initial_weights(parameters_of(TINY), 1234)
    trained = sorted(parameters_of(TINY).shapes(trained_only=True))
    digest = hashlib.sha256(b"".join(weights[name].tobytes() for name in trained)).hexdigest()
    assert digest == FIRST_DRAWN


def test_at_the_start_every_block_is_the_identity_and_the_output_zero():
    model = initialised(TINY)
    x, c = torch.randn(2, 16, 64), torch.randn(2, 64)
    assert torch.equal(model.blocks[1](x, c), x)
    output = model(torch.randn(2, 4, 8, 8), torch.tensor([3, 999]), torch.tensor([0, 10]))
    assert output.shape == (2, 8, 8, 8) and output.abs().max() == 0


def test_the_composite_gives_one_loss_a_sample(model_json):
    model = DiTModel(model_config_from_mapping(model_json, "model.json"))
    batch = {
        "pixels": torch.randint(0, 256, (3, 1, 8, 8), dtype=torch.uint8),
        "labels": torch.tensor([0, 9, 10]),
        "timesteps": torch.tensor([0, 500, 999]),
        "noise": torch.randn(3, 1, 8, 8),
    }
    loss = model(**batch)
    assert loss.shape == (3,) and torch.isfinite(loss).all()
    alone = model(**{key: value[1:2] for key, value in batch.items()})
    torch.testing.assert_close(alone, loss[1:2], rtol=1e-5, atol=0)


LARGE_SEEDS = (2**63 - 1, 2**63, 2**63 + 1, 2**64 - 1)
TABLE = ParameterSpec((500, 200), Normal(0.02))


def test_initial_weights_depend_on_seed_and_name_alone():
    fc1 = {"weight": ParameterSpec((8, 4), XAVIER_UNIFORM), "bias": ParameterSpec((8,))}
    whole, two = (
        {"table": TABLE} | {f"blocks.{i}.fc1.{kind}": p for i in range(n) for kind, p in fc1.items()} for n in (3, 2)
    )
    names, whole = list(whole), initial_weights(ParameterSpecs(whole), 1)
    assert list(whole) == names
    for name, parameter in two.items():
        np.testing.assert_array_equal(initial_value(name, parameter, 1), whole[name])
        assert parameter.initial is ZEROS or not np.array_equal(initial_value(name, parameter, 2), whole[name])
    assert not np.array_equal(whole["blocks.0.fc1.weight"], whole["blocks.1.fc1.weight"])
    drawn = {initial_value("table", ParameterSpec((1, 2), Normal(1.0)), seed).tobytes() for seed in LARGE_SEEDS}
    assert len(drawn) == len(LARGE_SEEDS)


def test_each_rule_is_what_it_says():
    xavier = initial_value("w", ParameterSpec((600, 200), XAVIER_UNIFORM), 0)
    assert abs(xavier).max() <= (6 / 800) ** 0.5 and xavier.std() == pytest.approx((2 / 800) ** 0.5, rel=0.01)
    patches = initial_value("w", ParameterSpec((600, 50, 2, 2), XAVIER_UNIFORM), 0)
    np.testing.assert_array_equal(patches.reshape(600, 200), xavier)
    table = initial_value("t", TABLE, 0)
    assert table.std() == pytest.approx(0.02, rel=0.01) and abs(table.mean()) < 1e-3
    assert (initial_value("g", ParameterSpec((4,), ONES), 0) == 1).all()
    assert not initial_value("b", ParameterSpec((4,)), 0).any()
    drawn = initial_value("own", ParameterSpec((3, 2), lambda draw, shape: draw.random(shape) + 5), 0)
    assert drawn.shape == (3, 2) and drawn.dtype == np.float32 and (drawn >= 5).all()


PLAIN = DiTConfig(input_size=8, num_classes=3, in_channels=3, hidden_size=48, num_layers=3, num_heads=4)
ALL = dataclasses.replace(
    PLAIN, qk_norm=True, rms_norm=True, swiglu=True, rope=True, wo_shift=True, bottleneck_dim=10, in_context_len=5,
    in_context_start=1,
)  # fmt: skip
PREDICTOR = {"model_id": "dit", "input_size": 32, "num_classes": 3, "in_channels": 3}
CONTENT = {"ae": {"model_id": "pixel"}, "diffusion": {"model_id": "flow_matching"}}
RATIOS = [{"hidden_size": width, "mlp_ratio": ratio, "num_heads": 1} for width in (40, 48, 52) for ratio in (4, 2.3)]


@pytest.mark.parametrize("sizes", [{}, {"wo_shift": False}, {"rms_norm": False}, {"learn_sigma": False}, *RATIOS])
def test_shapes_tell_every_option_but_rope_and_where_tokens_join(sizes):
    config = dataclasses.replace(ALL, **sizes)
    found = weight_converter_of(DiTConfig).of_shapes(parameters_of(config).shapes())
    assert parameters_of(found).shapes() == parameters_of(config).shapes()
    shown = dataclasses.replace(found, rope=True, in_context_start=1)
    assert shown == dataclasses.replace(config, mlp_ratio=shown.mlp_ratio)  # (several give the same whole width)


@pytest.mark.parametrize(("width", "hidden"), [(40, 106), (48, 128), (1152, 3072), (1024, 2730), (1280, 3413)])
def test_a_swiglu_is_two_thirds_as_wide_cut_off_and_not_rounded_up(width, hidden):
    assert dataclasses.replace(PLAIN, hidden_size=width, swiglu=True).mlp_hidden_size == hidden


def test_ranks_do_not_share_what_meanflow_derives():
    PLAIN.check_context_parallel(4)
    with pytest.raises(ConfigError, match=r"--context-parallel-size = 2.*is not supported with h_embedder"):
        dataclasses.replace(PLAIN, h_embedder=True).check_context_parallel(2)
    with pytest.raises(ConfigError, match="those in context: 21 % 4 = 1"):
        ALL.check_context_parallel(4)


def test_the_null_class_is_that_after_the_networks_own_classes():
    """The published samplers ask for class 1000 whatever the number of classes."""
    assert ALL.conditions.unconditional(2)["labels"].tolist() == [3, 3]
    assert parameters_of(ALL).shapes()["y_embedder.embedding_table.weight"] == (4, 48)


def test_turned_queries_and_keys_know_the_distance_of_their_patches_and_not_the_place():
    cos, sin = (table.astype(np.float64) for table in rotary_tables_2d(8, 4, num_prefix=2))
    assert cos.shape == (2 + 16, 4) and (cos[:2] == 1).all() and (sin[:2] == 0).all()
    turns = (cos + 1j * sin)[2:].reshape(4, 4, 4)  # (row, column, pairs)
    between = lambda a, b: turns[a] * turns[b].conj()  # noqa: E731
    np.testing.assert_allclose(between((3, 2), (1, 1)), between((2, 3), (0, 2)), atol=1e-6)
    np.testing.assert_allclose(between((3, 2), (1, 2))[2:], 1, atol=1e-6)  # the second half turns with the column


def test_tokens_in_context_are_cut_off_from_the_front():
    """At the start every block is the identity, so that they change nothing of the image's own tokens."""
    with_tokens = dataclasses.replace(PLAIN, in_context_len=5, in_context_start=2, rope=True)
    x, t, y = torch.randn(2, 3, 8, 8), torch.tensor([0.1, 0.9]), torch.tensor([0, 3])
    outputs = []
    for config in (dataclasses.replace(PLAIN, rope=True), with_tokens):
        weights = initial_weights(parameters_of(config), 0)
        weights["final_layer.linear.weight"] = np.random.default_rng(0).standard_normal((24, 48), np.float32)
        model = DiT(config)
        runtime.load_arrays(model, weights)
        outputs.append(model(x, t, y))
    assert torch.equal(*outputs) and outputs[0].abs().max() > 0


def test_tokens_in_context_join_before_the_block_that_is_named():
    sizes = []
    model = DiT(ALL)
    for block in model.blocks:
        block.register_forward_pre_hook(lambda block, given: sizes.append(given[0].shape[1]))
    model(torch.randn(1, 3, 8, 8), torch.zeros(1), torch.zeros(1, dtype=torch.int64))
    assert sizes == [16, 21, 21]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_projectors_read_the_tokens_of_the_image_after_the_block_that_is_named(depth):
    """1 is the first; tokens in context, which stand before those of the image, are not theirs."""
    model, nonzero_mask = DiT(dataclasses.replace(ALL, z_dims=(7, 5), projector_dim=9, encoder_depth=depth)), []
    for block in model.blocks:
        block.register_forward_hook(lambda block, given, tokens: nonzero_mask.append(tokens[:, -16:]))
    x, t, y = torch.randn(2, 3, 8, 8), torch.zeros(2), torch.zeros(2, dtype=torch.int64)
    output, projected = model(x, t, y, project=True)
    assert [tuple(p.shape) for p in projected] == [(2, 16, 7), (2, 16, 5)]
    for project, ours in zip(model.projectors, projected):
        assert torch.equal(project(nonzero_mask[depth - 1]), ours)
    assert torch.equal(output, model(x, t, y))


def test_options_and_presets_that_cannot_be_are_named():
    with pytest.raises(ConfigError, match=r"z_dims = \[768\].*needs 1 teachers"):
        model_config_from_mapping(CONTENT | {"predictor": PREDICTOR | {"z_dims": [768]}}, "model.json")
    for config, settings, message in (
        (PLAIN, {"in_context_len": 2, "in_context_start": 3}, "in_context_start = 3 must be below num_layers = 3"),
        (PLAIN, {"in_context_start": 1}, "has no effect where in_context_len is 0"),
        (PLAIN, {"bottleneck_dim": 0}, "bottleneck_dim = 0"),
        (PLAIN, {"rope": True, "num_heads": 8}, "the width of a head must be a multiple of 4"),
        (PLAIN, {"z_dims": (8,)}, "encoder_depth = 8.*must be a number of at most 3"),
        (PLAIN, {"z_dims": (8, 0), "encoder_depth": 1}, r"z_dims\[1\] = 0"),
        (PLAIN, {"z_dims": (8,), "encoder_depth": 1, "projector_dim": 0}, "projector_dim = 0"),
        (PLAIN, {"swiglu": True, "mlp_ratio": 1 / 48}, "gives the MLP's hidden layer no valid width"),
        (TEXT, {"text_dim": None, "pooled_dim": None}, "predictor.num_classes = 0"),
        (TEXT, {"text_dim": 0}, "predictor.text_dim = 0"),
        (TEXT, {"text_length": 0}, "predictor.text_length = 0"),
        (TEXT, {"pooled_encoder": 2}, "predictor.pooled_encoder = 2"),
        (TEXT, {"in_context_len": 2}, "predictor.in_context_len = 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            dataclasses.replace(config, **settings)
    assert {"LightningDiT-XL/1", "JiT-B/16"} < PRESETS.keys()
    predictor = PREDICTOR | {"preset": "JiT-B/16"}
    assert model_config_from_mapping(CONTENT | {"predictor": predictor}, "x").predictor.in_context_start == 4
    with pytest.raises(ConfigError, match="preset JiT-B/16, which has True"):
        model_config_from_mapping(CONTENT | {"predictor": predictor | {"rope": False}}, "x")


OF_LABELS = DiTConfig(input_size=8, num_classes=3, in_channels=3, hidden_size=48, num_layers=2, num_heads=4)
TEXT = dataclasses.replace(OF_LABELS, num_classes=0, text_dim=10, text_length=5, pooled_dim=6)
NO_POOLED, NO_STATES = {"pooled_dim": None}, {"text_dim": None}
IMAGES, T, NUMBERS = (
    torch.randn(2, 3, 8, 8, generator=torch.manual_seed(0)),
    torch.tensor([3, 900]),
    torch.tensor([0, 1]),
)
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
    return network(IMAGES, T, *given)


@pytest.mark.parametrize("chosen", [NO_POOLED, NO_STATES, {}])
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
    network = of_noise(dataclasses.replace(TEXT, **NO_POOLED))
    torch.testing.assert_close(answer(network, CAPTIONS), answer(network, CAPTIONS.flip(1)), rtol=1e-4, atol=1e-5)
    padded = torch.cat([CAPTIONS, torch.zeros(2, 3, 10)], 1)
    assert not torch.allclose(answer(network, padded), answer(network, CAPTIONS), atol=1e-4)


def test_a_dit_of_classes_that_is_given_captions_too_begins_as_it_was(framework):
    both = dataclasses.replace(OF_LABELS, text_dim=10)
    weights = initial_weights(parameters_of(both), 0)
    for name in weights:  # what is zero at the start but for the attention to the text
        if "cross_attn" not in name and not weights[name].any():
            weights[name] = np.random.default_rng(2).standard_normal(weights[name].shape, np.float32) * 0.1
    plain = built(OF_LABELS, {name: weights[name] for name in parameters_of(OF_LABELS).shapes()})
    assert torch.equal(answer(built(both, weights), NUMBERS, CAPTIONS), answer(plain, NUMBERS))


def test_what_steers_it_is_said_in_the_order_of_its_arguments():
    both = dataclasses.replace(TEXT, num_classes=3, pooled_encoder=1)
    label, states, pooled = both.conditions
    assert label == ClassLabel(3, 0.1) and states == TextStates(5, 10)
    assert pooled == PooledText(6, encoder=1, shared_dropout_key="text") and both.conditions.names == (
        "labels", "text", "pooled",
    )  # fmt: skip
    assert both.conditions.dropout_keys() == {"labels": 0, "text": 1} and TEXT.conditions.items == ("caption",)
    assert dataclasses.replace(TEXT, **NO_STATES).conditions.dropout_keys() == {"pooled": 0}


@pytest.mark.parametrize("settings", [{}, NO_POOLED, NO_STATES, {"num_classes": 3}])
def test_shapes_tell_what_steers_it(settings):
    config = dataclasses.replace(TEXT, **settings)
    found = weight_converter_of(DiTConfig).of_shapes(parameters_of(config).shapes())
    assert (found.num_classes, found.text_dim, found.pooled_dim) == (
        config.num_classes, config.text_dim, config.pooled_dim,
    )  # fmt: skip
    assert parameters_of(found).shapes() == parameters_of(config).shapes()


def test_a_model_json_wants_a_text_encoder_for_texts_and_none_without(model_json):
    encoder = {"model_id": "bert", "from_pretrained": "nowhere"}
    of = lambda **sections: model_config_from_mapping({**model_json, **sections}, "model.json")  # noqa: E731
    with pytest.raises(ConfigError, match="text_encoder is not used: predictor 'dit'"):
        of(text_encoder=encoder)
    predictor = model_json["predictor"] | {"text_dim": 16}
    with pytest.raises(ConfigError, match="text_encoder is missing, and predictor 'dit'"):
        of(predictor=predictor)
    predictor |= {"pooled_dim": 16, "pooled_encoder": 1}
    with pytest.raises(ConfigError, match="has 1 encoders, but predictor 'dit' needs 2"):
        of(predictor=predictor, text_encoder=encoder)
    assert len(of(predictor=predictor, text_encoder=[encoder, encoder]).text_encoders) == 2
