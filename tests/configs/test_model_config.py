import math

import pytest

from mindspeed_mm_dit.configs.arguments import checked, read_train_args
from mindspeed_mm_dit.configs.data import load_data_config
from mindspeed_mm_dit.configs.dit import PRESETS
from mindspeed_mm_dit.configs.fsdp2 import load_fsdp2_config
from mindspeed_mm_dit.configs.model import load_model_config, model_config_from_mapping
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.training.flags import parse as parse_flags
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


@pytest.mark.parametrize(("section", "key", "value", "message"), [
    ("predictor", "num_head", 4, "'num_heads'"),
    ("predictor", "num_heads", 5, "128 % 5 = 3"),
    ("predictor", "patch_size", 3, "8 % 3 = 2"),
    ("predictor", "num_layers", "four", "num_layers = 'four': expected a whole number"),
    ("predictor", "num_layers", "4", "write it without quotes: 4"),
    ("predictor", "num_layers", True, "expected a whole number"),
    ("predictor", "num_layers", -1, "model.json: predictor.num_layers = -1"),
    ("predictor", "num_layers", 10**8, "predictor.num_layers = 100000000"),
    ("predictor", "mlp_ratio", 0.001, "hidden_size(128) * mlp_ratio"),
    ("predictor", "mlp_ratio", -4, "must be at least 1"),
    ("predictor", "mlp_ratio", math.nan, "mlp_ratio = nan"),
    ("predictor", "class_dropout_prob", math.inf, "expected a number"),
    ("predictor", "preset", ["DiT-B/2"], "unknown preset"),
    ("predictor", "in_channels", 4, "does not match the latents of autoencoder 'pixel': 1 channels"),
    ("predictor", "learn_sigma", True, "does not fit"),
    ("predictor", "model_id", "dti", "'dit'"),
    ("predictor", "preset", "DiT-B/2", "contradicts preset DiT-B/2, which has 12"),
    ("predictor", "class_dropout_prob", 1.5, "must lie in [0, 1)"),
    ("diffusion", "noise_schedule", "linaer", "'linear' or 'squaredcos_cap_v2'"),
    ("ae", "channels", 2, "grey (1) or RGB (3)"),
    ("kl", "scaling_factor", 0.0, "scaling_factor = 0.0"),
    ("kl", "downsample_factor", 0, "ae.downsample_factor = 0"),
    ("kl", "latent_channels", -4, "ae.latent_channels = -4"),
    ("kl", "dtype", "fp16", "expected 'fp32' or 'bf16'"),
    ("predicter", "model_id", "dit", "'predictor'"),
])  # fmt: skip
def test_wrong_setting_is_refused_with_its_reason(model_json, section, key, value, message):
    if section == "kl":
        section, model_json["ae"] = "ae", {"model_id": "autoencoder_kl", "from_pretrained": "vae"}
    model_json.setdefault(section, {})[key] = value
    with pytest.raises(ConfigError) as caught:
        model_config_from_mapping(model_json, "model.json")
    assert message in str(caught.value)


def test_unreadable_file_is_refused_and_a_byte_order_mark_is_not(tmp_path):
    for content, message in (
        (b'{"ae": {}, "ae": {}}', "the key 'ae' occurs twice"),
        (b'{"note": "\xe9"}', "is not UTF-8: byte 0xe9 at position 10"),
        (b"[]", "expected a JSON object"),
        (b"{", "is not JSON: line 1"),
        (b"// mine\n{}", "is not JSON: line 1"),
    ):
        (tmp_path / "m.json").write_bytes(content)
        with pytest.raises(ConfigError, match=f"--model = {tmp_path}/m.json: {message}"):
            load_model_config(tmp_path / "m.json")
    text = (ROOT / "examples/dit/model.json").read_text()
    (tmp_path / "m.json").write_text(text, encoding="utf-8-sig")
    assert load_model_config(tmp_path / "m.json") == load_model_config(ROOT / "examples/dit/model.json")


def test_a_shift_that_counts_other_patches_is_refused(model_json):
    model_json["diffusion"] = {"model_id": "flow_matching", "dynamic_shift": "flux"}
    model_config_from_mapping(model_json, "model.json")
    model_json["predictor"]["patch_size"] = 1
    with pytest.raises(ConfigError, match="'flux': needs patches of 2x2, but predictor 'dit' has patches of 1x1"):
        model_config_from_mapping(model_json, "model.json")
