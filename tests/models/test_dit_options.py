"""Options of later recipes: each as published, with the traps that an implementation from memory falls into."""

import dataclasses

import numpy as np
import pytest
import torch

from mindspeed_mm_dit.configs.dit import PRESETS, DiTConfig
from mindspeed_mm_dit.configs.model import model_config_from_mapping
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.models.dit import DiT
from mindspeed_mm_dit.models.init import initial_weights
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.models.positions import rotary_tables_2d

PLAIN = DiTConfig(input_size=8, num_classes=3, in_channels=3, hidden_size=48, num_layers=3, num_heads=4)
ALL = dataclasses.replace(
    PLAIN, qk_norm=True, rms_norm=True, swiglu=True, rope=True, wo_shift=True, bottleneck_dim=10, in_context_len=5,
    in_context_start=1,
)  # fmt: skip
PREDICTOR = {"model_id": "dit", "input_size": 32, "num_classes": 3, "in_channels": 3}
CONTENT = {"ae": {"model_id": "pixel"}, "diffusion": {"model_id": "flow_matching"}}
SIX_RATIOS = [
    {"hidden_size": width, "mlp_ratio": ratio, "num_heads": 1} for width in (40, 48, 52) for ratio in (4, 2.3)
]


@pytest.mark.parametrize("sizes", [{}, {"wo_shift": False}, {"rms_norm": False}, {"learn_sigma": False}, *SIX_RATIOS])
def test_shapes_tell_every_option_but_rope_and_where_tokens_join(sizes):
    config = dataclasses.replace(ALL, **sizes)
    found = DiTConfig.of_shapes(parameters_of(config).shapes())
    assert parameters_of(found).shapes() == parameters_of(config).shapes()
    shown = dataclasses.replace(found, rope=True, in_context_start=1)
    assert shown == dataclasses.replace(config, mlp_ratio=shown.mlp_ratio)  # (several give the same whole width)


@pytest.mark.parametrize(("width", "hidden"), [(40, 106), (48, 128), (1152, 3072), (1024, 2730), (1280, 3413)])
def test_a_swiglu_is_two_thirds_as_wide_cut_off_and_not_rounded_up(width, hidden):
    assert dataclasses.replace(PLAIN, hidden_size=width, swiglu=True).mlp_hidden_size == hidden


def test_ranks_do_not_share_what_meanflow_derives():
    PLAIN.check_context_parallel(4)
    with pytest.raises(ConfigError, match=r"--context-parallel-size = 2: is not supported with h_embedder"):
        dataclasses.replace(PLAIN, h_embedder=True).check_context_parallel(2)
    with pytest.raises(ConfigError, match=r"does not divide tokens of an image and in context: 21 % 4 = 1"):
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


def test_a_model_json_of_projectors_without_a_teacher_is_refused():
    with pytest.raises(ConfigError, match=r"z_dims = \[768\]: needs 1 teachers"):
        model_config_from_mapping(CONTENT | {"predictor": PREDICTOR | {"z_dims": [768]}}, "model.json")


def test_options_that_cannot_be_are_named():
    for settings, message in (
        ({"in_context_len": 2, "in_context_start": 3}, "in_context_start = 3: is not a block of this network"),
        ({"in_context_start": 1}, "has no effect where in_context_len is 0"),
        ({"bottleneck_dim": 0}, "bottleneck_dim = 0"),
        ({"rope": True, "num_heads": 8}, "the width of a head must be a multiple of 4"),
        ({"z_dims": (8,)}, "encoder_depth = 8: must be a number of at most 3"),
        ({"z_dims": (8, 0), "encoder_depth": 1}, r"z_dims\[1\] = 0"),
        ({"z_dims": (8,), "encoder_depth": 1, "projector_dim": 0}, "projector_dim = 0"),
        ({"swiglu": True, "mlp_ratio": 1 / 48}, "gives the MLP's hidden layer no valid width"),
    ):
        with pytest.raises(ConfigError, match=message):
            dataclasses.replace(PLAIN, **settings)


def test_a_preset_with_another_option_beside_it_is_refused():
    assert {"LightningDiT-XL/1", "JiT-B/16"} < PRESETS.keys()
    predictor = PREDICTOR | {"preset": "JiT-B/16"}
    assert model_config_from_mapping(CONTENT | {"predictor": predictor}, "x").predictor.in_context_start == 4
    with pytest.raises(ConfigError, match="preset JiT-B/16, which has True"):
        model_config_from_mapping(CONTENT | {"predictor": predictor | {"rope": False}}, "x")
