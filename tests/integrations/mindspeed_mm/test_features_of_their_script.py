"""Features as files for the host's own pretrain_sora.py."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from mindspeed_mm_dit.configs.autoencoder import AutoencoderKLConfig
from mindspeed_mm_dit.configs.data import load_data_config
from mindspeed_mm_dit.configs.model import load_model_config
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.integrations.mindspeed_mm.megatron.features import open_samples, video, write_features
from tests.training.launch import Configs


@pytest.fixture
def configs(tmp_path, digits_folder):
    return Configs.create(tmp_path, digits_folder)


def write(configs, count):
    features = configs.folder / "features"
    write_features(str(configs.folder / "model.json"), str(configs.folder / "data.json"), count, str(features), 7)
    return features


def test_files_hold_the_samples_of_the_run(configs):
    features = write(configs, 66)
    model, data = load_model_config(configs.folder / "model.json"), load_data_config(configs.folder / "data.json")
    batch = open_samples(model, data, 7).batch(np.array([65]))
    found = torch.load(features / "65.pt", weights_only=True)
    assert sorted(found) == ["drawn_noise", "drawn_timesteps", "prompt_ids", "prompt_mask", "video"]
    assert found["video"].dtype == torch.uint8 and found["prompt_ids"].dtype == torch.int64
    for name, key in (("video", "pixels"), ("prompt_ids", "labels"), ("drawn_noise", "noise")):
        np.testing.assert_array_equal(found[name].numpy(), batch[key][0])
    written, theirs = (json.loads((features / f"{name}.json").read_text()) for name in ("data", "model"))
    index = json.loads(Path(written["dataset_param"]["basic_parameters"]["data_path"]).read_text())
    assert [entry["file"] for entry in index] == [f"{number}.pt" for number in range(66)]
    assert theirs["load_text_features"] is True and theirs["load_video_features"] is False
    pytest.raises(ConfigError, write, configs, 0).match("--samples")


def test_latents_of_a_cache_are_drawn_and_scaled():
    mean, std, noise = (np.full((1, 4, 2, 2), value, np.float32) for value in (1.0, 2.0, 3.0))
    ae = AutoencoderKLConfig(from_pretrained="vae", scaling_factor=0.5)
    assert (video({"latent_mean": mean, "latent_std": std, "posterior_noise": noise}, 0, ae) == 3.5).all()
    assert (video({"latent_mean": mean}, 0, ae) == 0.5).all()
