"""What the autoencoder's config.json says need not be said again, and must not be contradicted."""

import json

import pytest

from mindspeed_mm_dit.configs.model import model_config_from_mapping
from mindspeed_mm_dit.errors import ConfigError, UserError
from tests.autoencoder_kl_fixtures import SD_VAE

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


def test_what_nobody_tells_is_stable_diffusion_s(read):
    model = read({}, in_channels=4)
    assert (model.ae.downsample_factor, model.ae.latent_channels, model.ae.scaling_factor) == (8, 4, 0.18215)
    assert read(SD_VAE, in_channels=4).ae == model.ae


def test_statistics_of_the_channels_are_read_and_must_not_be_contradicted(read):
    told = {"latents_mean": [0.0, 1.0, 2.0, 3.0], "latents_std": [1.0, 2.0, 3.0, 4.0]}
    assert read(told, in_channels=4).ae.latents_std == (1.0, 2.0, 3.0, 4.0)
    assert read(told, in_channels=4, **told).ae.latents_mean == (0.0, 1.0, 2.0, 3.0)
    with pytest.raises(ConfigError, match=r"ae.latents_std = \[1.0, 2.0, 3.0, 5.0\]: contradicts the autoencoder"):
        read(told, in_channels=4, latents_std=[1.0, 2.0, 3.0, 5.0])


@pytest.mark.parametrize(("config", "section", "message"), [
    (THREE_LEVELS, {"downsample_factor": 8}, "ae.downsample_factor = 8: contradicts"),
    (THREE_LEVELS, {"latent_channels": 4}, "config.json makes it 16"),
    (THREE_LEVELS, {"scaling_factor": 0.18215}, "ae.scaling_factor = 0.18215: contradicts"),
    (THREE_LEVELS, {"scaling_factor": "x"}, "ae.scaling_factor = 'x': contradicts"),
    (THREE_LEVELS, {"from_pretrained": ""}, "ae.from_pretrained = ''"),
    (THREE_LEVELS, {"from_pretrained": "a" * 300}, "ae.from_pretrained"),
    (THREE_LEVELS, {"dtype": None}, "dtype = None"),
    ({"shift_factor": "much"}, {}, "config.json: shift_factor = 'much'"),
    ({"block_out_channels": "wide"}, {}, "config.json: block_out_channels = 'wide'"),
    ({"latent_channels": 10**30}, {}, "must have a magnitude of at most"),
    ({"latents_mean": [0.0, 1.0]}, {}, "ae.latents_mean: has 2 numbers, but a latent has 4 channels"),
    ({"latents_std": [1.0, 0.0, 1.0, 1.0]}, {}, "ae.latents_std = [1.0, 0.0, 1.0, 1.0]"),
    ({"latents_mean": [1.0] * 4, "shift_factor": 0.5}, {}, "ae.latents_mean, shift_factor"),
    ([], {}, "expected a JSON object"),
])  # fmt: skip
def test_contradiction_or_unusable_config_json_is_refused(read, config, section, message):
    with pytest.raises(UserError) as caught:
        read(config, **section)
    assert message in str(caught.value)
