from __future__ import annotations

import pytest

from mindspeed_mm_dit.configs.model import load_model_config, model_config_from_mapping
from mindspeed_mm_dit.configs.presets import PRESETS
from mindspeed_mm_dit.errors import ConfigError
from tests.conftest import ROOT


@pytest.mark.parametrize("folder", ["", "imagenet256", "imagenet512", "cat_dog"])
def test_every_shipped_model_json_is_read(folder):
    config = load_model_config(ROOT / "examples/dit" / folder / "model.json")
    assert config.predictor.model_id == "dit"


def test_imagenet512_is_dit_xl_2(model_json):
    config = load_model_config(ROOT / "examples/dit/imagenet512/model.json")
    sizes = {key: getattr(config.predictor, key) for key in PRESETS["DiT-XL/2"]}
    assert sizes == PRESETS["DiT-XL/2"]
    assert config.image_size == 512


def test_a_preset_stands_for_its_sizes(model_json):
    predictor = {"model_id": "dit", "preset": "DiT-B/4", "input_size": 8, "num_classes": 10, "in_channels": 1,
                 "learn_sigma": False}  # fmt: skip
    config = model_config_from_mapping({**model_json, "predictor": predictor}, "model.json")
    assert (config.predictor.hidden_size, config.predictor.num_layers, config.predictor.patch_size) == (768, 12, 4)


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("predictor", "num_head", 4, "Did you mean 'num_heads'"),
        ("predictor", "num_heads", 5, "128 % 5 = 3"),
        ("predictor", "patch_size", 3, "8 % 3 = 2"),
        ("predictor", "num_layers", "four", "expected int, found str"),
        ("predictor", "in_channels", 4, "makes latents of 1 channels"),
        ("predictor", "learn_sigma", True, "does not fit"),
        ("predictor", "model_id", "dti", "Did you mean 'dit'"),
        ("predictor", "preset", "DiT-B/2", "preset DiT-B/2 means 12"),
        ("predictor", "class_dropout_prob", 1.5, "must lie in [0, 1)"),
        ("diffusion", "noise_schedule", "cosine", "noise_schedule"),
        ("ae", "channels", 2, "grey (1) or RGB (3)"),
    ],
)
def test_a_wrong_setting_is_named_with_its_reason(model_json, section, key, value, message):
    model_json[section][key] = value
    with pytest.raises(ConfigError) as caught:
        model_config_from_mapping(model_json, "model.json")
    assert message in str(caught.value)
    assert key in str(caught.value) or "predictor" in str(caught.value)


def test_an_unknown_section_is_refused(model_json):
    with pytest.raises(ConfigError, match="Did you mean 'predictor'"):
        model_config_from_mapping({**model_json, "predicter": {}}, "model.json")
