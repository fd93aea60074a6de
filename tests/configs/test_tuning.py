"""What a run trains: patterns of frozen modules and of layers with adapters, on the meta backend."""

import argparse
import dataclasses
import math
from itertools import product

import pytest

from mindspeed_mm_dit.configs.dit import DiTConfig
from mindspeed_mm_dit.configs.flag import rows_of
from mindspeed_mm_dit.configs.joint import FluxConfig, ZImageConfig
from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.configs.tuning import FineTuning, Tuning, tuning_from_flags
from mindspeed_mm_dit.configs.video_transformer import WanConfig
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.models.meta import parameters_of

WAN = parameters_of(WanConfig(num_layers=3, num_attention_heads=2, attention_head_dim=32, ffn_dim=96))
SMALL = DiTConfig(hidden_size=48, num_layers=4, num_heads=4, input_size=8, num_classes=10)
DIT = parameters_of(SMALL)
FAMILIES = {
    "dit": SMALL,
    "swiglu": dataclasses.replace(SMALL, swiglu=True),
    "wan": WanConfig(num_layers=3, num_attention_heads=2, attention_head_dim=32, ffn_dim=96),
    "flux": FluxConfig(latent_size=(8, 8), num_layers=1, num_single_layers=1),
    "z_image": ZImageConfig(latent_size=(8, 8)),
}


def trained(parameters):
    return [name for name, p in parameters.items() if p.trained]


def test_patterns_name_layers_as_mindspeed_mm_does():
    for pattern, layers in {
        "to_q": [f"{i}.{a}.to_q" for i in range(3) for a in ("attn1", "attn2")],
        "attn1.to_q": [f"{i}.attn1.to_q" for i in range(3)],
        "blocks.{*}.attn2.to_out.0": [f"{i}.attn2.to_out.0" for i in range(3)],
        "predictor.blocks.{0,2}.ffn.net.2": ["0.ffn.net.2", "2.ffn.net.2"],
        "blocks.{1-2}.attn1.to_k": ["1.attn1.to_k", "2.attn1.to_k"],
        "blocks.1.attn1.to_v": ["1.attn1.to_v"],
        "{*}" * 12 + "1{*}.attn1{*}q": ["1.attn1.to_q"],
    }.items():
        assert Tuning((pattern,)).layers(WAN) == [f"blocks.{layer}" for layer in layers]
    assert Tuning(("condition_embedder.time_proj",)).layers(WAN) == ["condition_embedder.time_proj"]


def test_adapters_and_frozen_modules_leave_the_base_untrained():
    rank = 4
    parameters = Tuning(("qkv", "attn.proj"), rank).applied(DIT)
    assert trained(parameters) == list(parameters.shapes(saved_only=True))
    assert {name.rpartition(".lora_")[0].partition(".attn.")[2] for name in trained(parameters)} == {"qkv", "proj"}
    assert parameters.num_elements(trained_only=True) == 4 * rank * (48 + 3 * 48 + 48 + 48)
    assert parameters.num_elements() - parameters.num_elements(trained_only=True) == DIT.num_elements()
    parameters = Tuning(freeze=("blocks.{0-1}", "x_embedder", "pos_embed")).applied(DIT)
    assert parameters.shapes(saved_only=True) == DIT.shapes()
    assert not any(name.startswith(("blocks.0.", "blocks.1.", "x_embedder.")) for name in trained(parameters))
    assert {"blocks.2.attn.qkv.weight", "t_embedder.mlp.0.bias"} <= set(trained(parameters))


def test_closed_form_counts_what_single_blocks_have_too():
    some_blocks, frozen = Tuning(("blocks.{1-2}.attn.qkv", "fc1"), 3), Tuning(freeze=("blocks.{0-1}", "t_embedder"))
    for tuning, shards, trained_only in product((some_blocks, frozen, Tuning(("fc2",), 5)), (1, 3), (False, True)):
        parameters = tuning.applied(DIT)
        each = (-(-s[0] // shards) * math.prod(s[1:]) for s in parameters.shapes(trained_only).values())
        assert parameters.num_elements(shards, trained_only) == sum(each)


@pytest.mark.parametrize(("family", "named", "patterns"), [
    ("dit", "attention", ["blocks.{*}.attn.qkv", "blocks.{*}.attn.proj"]),
    ("dit", "mlp", ["blocks.{*}.mlp.fc1", "blocks.{*}.mlp.fc2"]),
    ("wan", "attention", [f"blocks.{{*}}.attn{n}.to_{x}" for n in (1, 2) for x in ("q", "k", "v", "out.0")]),
    ("wan", "mlp", ["blocks.{*}.ffn.net.0.proj", "blocks.{*}.ffn.net.2"]),
    ("swiglu", "mlp", ["blocks.{*}.mlp.w12", "blocks.{*}.mlp.w3"]),
    ("flux", "mlp", [f"transformer_blocks.{{*}}.{x}.net.{y}" for x in ("ff", "ff_context") for y in ("0.proj", "2")]
     + ["single_transformer_blocks.{*}.proj_mlp"]),
    ("z_image", "mlp", [f"{x}.{{*}}.feed_forward.w{n}" for x in ("noise_refiner", "context_refiner", "layers")
                        for n in (1, 2, 3)]),
])  # fmt: skip
def test_a_set_names_the_same_layers_of_every_network(family, named, patterns):
    parameters = parameters_of(FAMILIES[family])
    tuning = Tuning((named, "to_nothing")).spelled_out(parameters)
    assert tuning.targets == (*patterns, "to_nothing")
    every, some = (Tuning((own,)).spelled_out(parameters) for own in ("all", named))
    assert set(some.layers(parameters)) < set(every.layers(parameters))
    assert all(parameters.block_of(layer) for layer in every.layers(parameters))


@pytest.mark.parametrize("family", FAMILIES)
def test_frozen_set_has_the_layers_that_it_has_elsewhere(family):
    parameters = parameters_of(FAMILIES[family])
    before = set(trained(parameters))
    for named in ("attention", "mlp", "all"):
        left = set(trained(Tuning(freeze=(named,)).spelled_out(parameters).applied(parameters)))
        layers = Tuning((named,)).spelled_out(parameters).layers(parameters)
        assert layers and not left & {f"{layer}.{part}" for layer in layers for part in ("weight", "bias")}, named
        assert left >= {name for name in before if not parameters.block_of(name)}, named


def flags(words):
    parser = argparse.ArgumentParser()
    for row in rows_of(FineTuning):
        row(parser)
    return tuning_from_flags(RunConfig.of(vars(parser.parse_args(words.split()))))


@pytest.mark.parametrize(("tuning", "words"), [
    (lambda: Tuning(("to_qq",)).applied(WAN), r"--lora-target-modules = to_qq.*'attn\d.to_q'"),
    (lambda: Tuning(("patch_embedding",)).applied(WAN), "matches no linear layer"),
    (lambda: Tuning(freeze=("blok",)).applied(WAN), "--freeze = blok"),
    (lambda: Tuning(freeze=("weight",)).applied(WAN), "matches no module"),
    (lambda: Tuning(freeze=("{*}",)).applied(WAN), "leaves nothing to train"),
    (lambda: Tuning(freeze=("blocks.{3-1}",)).applied(WAN), "runs backwards"),
    (lambda: Tuning(("to_q",), rank=0), "--lora-r = 0"),
    (lambda: Tuning(("to_q",), alpha=-1), "--lora-alpha = -1"),
    (lambda: flags("--lora-r 4"), "have no effect without --lora-target-modules"),
    (lambda: flags("--lora-target-modules qkv --freeze blocks.{0}"), "--freeze"),
    (lambda: flags("--lora-target-modules qkv --lora-dropout 0.1"), "--lora-dropout = 0.1"),
])  # fmt: skip
def test_impossible_tuning_is_refused(tuning, words):
    pytest.raises(ConfigError, tuning).match(f"(?s){words}")
