"""A model that cannot fit is refused by its largest setting; a step that may not fit is a warning."""

import dataclasses

import pytest

from mindspeed_mm_dit.configs.autoencoder import AutoencoderKLConfig
from mindspeed_mm_dit.configs.diffusion import GaussianDiffusionConfig
from mindspeed_mm_dit.configs.dit import DiTConfig
from mindspeed_mm_dit.configs.fsdp2 import Fsdp2Config
from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.configs.precision import AUTOCAST, FLOAT32, SHARDED_BF16
from mindspeed_mm_dit.configs.predictor import count
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.planning import (
    MemoryLimit,
    Placement,
    check_model_fits,
    check_state_fits,
    host_bytes,
    memory,
    memory_warning,
    state_bytes,
)

GIB = 2**30
XL = DiTConfig(input_size=32, num_classes=1000)


def model_of(**predictor):
    ae = AutoencoderKLConfig("not read", latent_channels=predictor.get("in_channels", 4))
    return ModelConfig(ae, GaussianDiffusionConfig(), dataclasses.replace(XL, **predictor))


HUGE = [
    ("hidden_size", {"hidden_size": 10**9}),
    ("num_layers", {"num_layers": 1000}),
    ("num_classes", {"num_classes": 10**12}),
    ("input_size", {"input_size": 10**6}),
    ("mlp_ratio", {"mlp_ratio": 1e9}),
    ("in_channels", {"in_channels": 10**9}),
    ("hidden_size", {"hidden_size": 2**62, "mlp_ratio": 1.0}),
]


@pytest.mark.parametrize(("setting", "sizes"), HUGE, ids=str)
def test_model_that_cannot_fit_is_refused_by_its_setting(setting, sizes):
    for check in (check_model_fits, lambda model, place: check_state_fits(model, Placement(1, 1, FLOAT32), place)):
        with pytest.raises(ConfigError, match=rf"predictor.{setting} = .*80.0 GiB"):
            check(model_of(**sizes), MemoryLimit("a GPU", 80 * GIB))


@pytest.mark.parametrize("shards", [1, 7])
def test_closed_form_counts_what_the_shapes_have(shards):
    parameters = parameters_of(XL)
    each = list(parameters.values())
    assert parameters.num_elements(shards) == count(each, shards)
    assert parameters.num_elements(shards, trained_only=True) == count([p for p in each if p.trained], shards)


def test_exact_fit_passes_and_a_byte_less_does_not():
    model, placement = model_of(), Placement(2, 2, FLOAT32)
    need = state_bytes(memory(model, placement))
    check_state_fits(model, placement, MemoryLimit("a GPU", need))
    check_state_fits(model, placement, MemoryLimit("this machine", 2 * need, num_processes=2))
    for place in (MemoryLimit("a GPU", need - 1), MemoryLimit("this machine", 2 * need - 1, num_processes=2)):
        with pytest.raises(ConfigError, match="gradients, optimizer state and average"):
            check_state_fits(model, placement, place)
    check_model_fits(model, MemoryLimit("this machine", host_bytes(XL)))
    with pytest.raises(ConfigError, match="which 2 ranks share"):
        check_model_fits(model, MemoryLimit("this machine", host_bytes(XL), num_processes=2))


def test_step_that_may_not_fit_is_a_warning():
    placement, place = Placement(1, 1, AUTOCAST), MemoryLimit("a GPU", 24 * GIB)
    warning = memory_warning(model_of(), placement, 64, False, place)
    fits = memory(model_of(), placement, False).largest_micro_batch(24 * GIB)
    assert f"a micro-batch of {fits} fits" in warning and "--micro-batch-size = 64" in warning
    assert memory_warning(model_of(), placement, fits, False, place) is None


def test_layout_of_a_run_is_that_of_its_yaml():
    assert Placement(8, 1, AUTOCAST).sharded_by(None) == Placement(8, 1, AUTOCAST)
    yaml = Fsdp2Config(sharding_size=4, recompute_modules=("predictor.blocks.{*}",), num_to_forward_prefetch=1,
                       reshard_after_forward=False)  # fmt: skip
    wanted = Placement(8, 4, SHARDED_BF16, recompute=True, prefetch=1, reshard_after_forward=False)
    assert Placement(8, 1, SHARDED_BF16).sharded_by(yaml) == wanted
