import argparse
import dataclasses
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from mindspeed_mm_dit.configs import run
from mindspeed_mm_dit.configs.arguments import checked, read_train_args
from mindspeed_mm_dit.configs.condition import TextStates, Vector
from mindspeed_mm_dit.configs.data import load_data_config
from mindspeed_mm_dit.configs.dit import PRESETS
from mindspeed_mm_dit.configs.fsdp2 import load_fsdp2_config
from mindspeed_mm_dit.configs.model import load_model_config, model_config_from_mapping
from mindspeed_mm_dit.configs.predictor import PredictorConfig
from mindspeed_mm_dit.errors import CheckpointError, ConfigError, UserError
from mindspeed_mm_dit.models.weight_adapters import WeightConverter, shape_of
from mindspeed_mm_dit.training.flags import parse as parse_flags
from tests.autoencoder_kl_fixtures import SD_VAE
from tests.conftest import ROOT


@pytest.mark.parametrize("folder", ["", "imagenet256", "imagenet512", "cat_dog"])
def test_shipped_configs_are_read(folder):
    place = ROOT / "examples/dit" / folder
    config = load_model_config(place / "model.json")
    sizes = {key: getattr(config.predictor, key) for key in PRESETS["DiT-XL/2"]}
    assert config.predictor.model_id == "dit" and (folder != "imagenet512" or sizes == PRESETS["DiT-XL/2"])
    words = read_train_args(place / "train.args")
    args = checked(parse_flags(["--mm-model", "m.json", "--mm-data", "d.json", *words]), 8)
    assert args.save == args.load
    assert load_data_config(place / "data.json").dataset_param.image_size
    assert load_fsdp2_config(place / "fsdp2.yaml").sub_modules_to_wrap


def test_a_preset_stands_for_its_sizes(model_json):
    predictor = {"model_id": "dit", "preset": "DiT-B/4", "input_size": 8, "num_classes": 10, "in_channels": 1,
                 "learn_sigma": False}  # fmt: skip
    config = model_config_from_mapping({**model_json, "predictor": predictor}, "model.json")
    assert (config.predictor.hidden_size, config.predictor.num_layers, config.predictor.patch_size) == (768, 12, 4)


@pytest.mark.parametrize(("section", "key", "value", "message"), [  # (the bounds: test_bounds.py)
    ("predictor", "num_head", 4, "'num_heads'"),
    ("predictor", "num_heads", 5, "128 % 5 = 3"),
    ("predictor", "patch_size", 3, "8 % 3 = 2"),
    ("predictor", "num_layers", "four", "num_layers = 'four'"),
    ("predictor", "num_layers", "4", "without quotes"),
    ("predictor", "num_layers", True, "whole number"),
    ("predictor", "num_layers", 10**8, "predictor.num_layers = 100000000"),
    ("predictor", "mlp_ratio", 0.001, r"hidden_size\(128\) \* mlp_ratio"),
    ("predictor", "mlp_ratio", math.nan, "mlp_ratio = nan"),
    ("predictor", "class_dropout_prob", math.inf, "class_dropout_prob"),
    ("predictor", "preset", ["DiT-B/2"], "preset"),
    ("predictor", "preset", "DiT-B/2", "DiT-B/2.* 12"),
    ("predictor", "in_channels", 4, "'pixel'.* 1 channel"),
    ("predictor", "learn_sigma", True, "variance_type = 'fixed_small'.* 2"),
    ("predictor", "model_id", "dti", "'dit'"),
    ("diffusion", "noise_schedule", "linaer", "'linear' or 'squaredcos_cap_v2'"),
    ("ae", "channels", 2, "channels = 2 .* 1 .* 3"),
    ("kl", "dtype", "fp16", "'fp32' or 'bf16'"),
    ("predicter", "model_id", "dit", "'predictor'"),
])  # fmt: skip
def test_wrong_setting_is_refused_with_its_reason(model_json, section, key, value, message):
    if section == "kl":
        section, model_json["ae"] = "ae", {"model_id": "autoencoder_kl", "from_pretrained": "vae"}
    model_json.setdefault(section, {})[key] = value
    pytest.raises(ConfigError, model_config_from_mapping, model_json, "model.json").match(f"(?s){message}")


def test_unreadable_file_is_refused_and_a_byte_order_mark_is_not(tmp_path):
    for content, message in (
        (b'{"ae": {}, "ae": {}}', "'ae'"),
        (b'{"note": "\xe9"}', "UTF-8.* 0xe9 .* 10"),
        (b"[]", "JSON object"),
        (b"{", "JSON.* line 1"),
        (b"// mine\n{}", "JSON.* line 1"),
    ):
        (tmp_path / "m.json").write_bytes(content)
        pytest.raises(ConfigError, load_model_config, tmp_path / "m.json").match(f"--model = .*/m.json.*{message}")
    text = (ROOT / "examples/dit/model.json").read_text()
    (tmp_path / "m.json").write_text(text, encoding="utf-8-sig")
    assert load_model_config(tmp_path / "m.json") == load_model_config(ROOT / "examples/dit/model.json")


def test_a_shift_that_counts_other_patches_is_refused(model_json):
    model_json["diffusion"] = {"model_id": "flow_matching", "dynamic_shift": "flux"}
    model_config_from_mapping(model_json, "model.json")
    model_json["predictor"]["patch_size"] = 1
    pytest.raises(ConfigError, model_config_from_mapping, model_json, "model.json").match("'flux'.* 2x2.*'dit'.* 1x1")


def test_last_example_of_a_vector_is_its_null_if_dropped():
    for dropout in (0.0, 0.1):
        vector = Vector(width=4, dropout=dropout)
        examples = vector.examples(3)["vector"]
        assert examples.shape == (3, 4) and examples.dtype == np.float32 and examples[:-1].all()
        assert examples[-1].any() != vector.has_unconditional
        assert not vector.unconditional(2)["vector"].any()
    pytest.raises(ConfigError, TextStates(length=3, width=4).unconditional, 2).match("predictor.* text encoder")


def test_predictor_splits_no_sample_and_lacks_nothing_by_default():
    plain = SimpleNamespace()
    PredictorConfig.check_context_parallel(plain, 1)
    refused = pytest.raises(ConfigError, PredictorConfig.check_context_parallel, plain, 2)
    refused.match("--context-parallel-size = 2")
    for name, words in (("a", r"SOURCE.* a .*\(2, 3\).* 4"), ("b", "SOURCE has no weight b,")):
        pytest.raises(CheckpointError, shape_of, {"a": (2, 3)}, name, 4).match(words)
    assert shape_of({"a": (2, 3)}, "a", 2) == (2, 3)
    assert not WeightConverter(None).is_optional("a.weight") and PredictorConfig.settings_of_size(plain) == {}


def test_a_setting_of_an_optimizer_that_is_a_flag_already_is_named(monkeypatch):
    @dataclasses.dataclass
    class Config:
        lr: float = dataclasses.field(default=1.0, metadata={"help": "a rate of its own", "how": {}})

    monkeypatch.setattr(run, "settings", lambda: {"lr": (dataclasses.fields(Config)[0], ["sophia"])})
    monkeypatch.setitem(run.OPTIMIZERS, "sophia", SimpleNamespace(config=Config))
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr")
    pytest.raises(ConfigError, run.optimizer_settings, parser).match("'lr' of optimizer 'sophia'")


THREE_LEVELS = {"block_out_channels": [8, 16, 16], "latent_channels": 16, "scaling_factor": 0.3611}


@pytest.fixture
def read(tmp_path):
    """Return a function: (config.json, ae section, in_channels) -> ModelConfig."""

    def read(config, in_channels=16, path="vae", **section):
        (tmp_path / "vae").mkdir(exist_ok=True)
        (tmp_path / "vae" / "config.json").write_text(json.dumps(config))
        ae = {"model_id": "autoencoder_kl", "from_pretrained": str(tmp_path / path), **section}
        predictor = {"model_id": "dit", "input_size": 8, "num_classes": 2, "in_channels": in_channels}
        content = {"ae": ae, "diffusion": {"model_id": "gaussian_diffusion"}, "predictor": predictor}
        return model_config_from_mapping(content, "model.json")

    return read


@pytest.mark.parametrize("path", ["vae", "vae/weights.safetensors"])
def test_settings_left_out_or_null_are_read_from_config_json(read, path):
    for section in ({}, {"scaling_factor": None, "latent_channels": None}, {"downsample_factor": 4}):
        model = read(THREE_LEVELS, path=path, **section)
        assert (model.ae.downsample_factor, model.ae.latent_channels, model.ae.scaling_factor) == (4, 16, 0.3611)
        assert model.sample_size[-1] == 32


def test_untold_settings_are_stable_diffusion_s_and_told_ones_stay(read):
    model = read({}, in_channels=4)
    assert (model.ae.downsample_factor, model.ae.latent_channels, model.ae.scaling_factor) == (8, 4, 0.18215)
    assert read(SD_VAE, in_channels=4).ae == model.ae
    told = {"latents_mean": [0.0, 1.0, 2.0, 3.0], "latents_std": [1.0, 2.0, 3.0, 4.0]}
    assert read(told, in_channels=4).ae.latents_std == (1.0, 2.0, 3.0, 4.0)
    assert read(told, in_channels=4, **told).ae.latents_mean == (0.0, 1.0, 2.0, 3.0)
    refused = pytest.raises(ConfigError, read, told, in_channels=4, latents_std=[1.0, 2.0, 3.0, 5.0])
    refused.match(r"ae.latents_std = \[1.0, 2.0, 3.0, 5.0\]")


@pytest.mark.parametrize(("config", "section", "message"), [
    (THREE_LEVELS, {"downsample_factor": 8}, "ae.downsample_factor = 8"),
    (THREE_LEVELS, {"latent_channels": 4}, r"config.json.* 16\b"),
    (THREE_LEVELS, {"scaling_factor": 0.18215}, "ae.scaling_factor = 0.18215"),
    (THREE_LEVELS, {"scaling_factor": "x"}, "ae.scaling_factor = 'x'"),
    (THREE_LEVELS, {"from_pretrained": ""}, "ae.from_pretrained = ''"),
    (THREE_LEVELS, {"from_pretrained": "a" * 300}, "ae.from_pretrained"),
    (THREE_LEVELS, {"dtype": None}, "dtype = None"),
    ({"shift_factor": "much"}, {}, "config.json.* shift_factor = 'much'"),
    ({"block_out_channels": "wide"}, {}, "config.json.* block_out_channels = 'wide'"),
    ({"latent_channels": 10**30}, {}, "latent_channels"),
    ({"latents_mean": [0.0, 1.0]}, {}, "ae.latents_mean.* 2 .* 4 "),
    ({"latents_std": [1.0, 0.0, 1.0, 1.0]}, {}, r"ae.latents_std = \[1.0, 0.0, 1.0, 1.0\]"),
    ({"latents_mean": [1.0] * 4, "shift_factor": 0.5}, {}, "ae.latents_mean and ae.shift_factor"),
    ([], {}, "JSON object"),
])  # fmt: skip
def test_contradiction_or_unusable_config_json_is_refused(read, config, section, message):
    pytest.raises(UserError, read, config, **section).match(f"(?s){message}")
