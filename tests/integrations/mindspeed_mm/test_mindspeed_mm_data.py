"""A data.json as MindSpeed-MM has it: what its keys mean here, and what is refused by name."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from mindspeed_mm_dit.configs.autoencoder import AutoencoderKLConfig
from mindspeed_mm_dit.configs.data import DataloaderParam, load_data_config
from mindspeed_mm_dit.configs.model import load_model_config
from mindspeed_mm_dit.configs.source import Budget
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.integrations.mindspeed_mm.megatron.features import open_samples, video, write_features
from mindspeed_mm_dit.models.data import check_sizes, with_budget
from tests.conftest import ROOT
from tests.training.launch import Configs

WAN = {
    "dataset_param": {
        "dataset_type": "t2v",
        "basic_parameters": {"data_path": "data.txt", "data_storage_mode": "combine"},
        "preprocess_parameters": {
            "video_processor_type": "OpensoraplanVideoProcessor", "video_reader_type": "DecordVideo",
            "image_reader_type": "Image", "num_frames": 81, "min_num_frames": 1, "frame_interval": 1,
            "auto_interval": False, "max_height": 480, "max_width": 832, "max_hxw": 399360, "train_fps": 24,
            "speed_factor": 1.0, "drop_short_ratio": 0.0, "cfg": 0.0, "hw_stride": 8, "force_resolution": False,
            "hw_aspect_thr": 5.0, "truncate_t_by_sp": False, "train_pipeline": {"video": []},
        },
        "use_text_processer": True,
        "enable_text_preprocessing": True,
        "text_preprocess_methods": {"method": "whitespace_clean"},
        "tokenizer_config": {"from_pretrained": "tokenizer", "model_max_length": 512},
    },
    "dataloader_param": {
        "dataloader_mode": "sampler", "sampler_type": "LengthGroupedSampler", "shuffle": True, "drop_last": True,
        "pin_memory": True, "group_frame": False, "group_resolution": False, "group_data": True,
        "initial_global_step_for_sampler": 0,
    },
}  # fmt: skip
"""The keys of its examples of Wan 2.1 and 2.2, by which ``tests/training/test_clips_run.py`` trains."""


def read(folder, content, lines="videos, videos/annotation.json\n"):
    (folder / "data.txt").write_text(lines)
    content["dataset_param"]["basic_parameters"].setdefault("data_path", "")
    if content["dataset_param"]["basic_parameters"]["data_path"] == "data.txt":
        content["dataset_param"]["basic_parameters"]["data_path"] = str(folder / "data.txt")
    (folder / "data.json").write_text(json.dumps(content))
    return load_data_config(folder / "data.json")


def changed(section, key, value):
    content = copy.deepcopy(WAN)
    part = content[section]
    for name in key.split(".")[:-1]:
        part = part[name]
    part[key.rpartition(".")[2]] = value
    return content


@pytest.mark.parametrize(("recipe", "side"), [("t2v_a14b", 16), ("i2v_a14b", 16), ("ti2v_5b", 32)])
def test_budget_has_sides_that_each_wan_takes(tmp_path, recipe, side):
    """One data.json serves all of Wan 2.2 there; the autoencoder of TI2V-5B divides sides by twice as much."""
    model = load_model_config(ROOT / f"examples/dit/wan2.2_{recipe}/model.json")
    param = with_budget(model, read(tmp_path, copy.deepcopy(WAN)).dataset_param)
    check_sizes(model, param)
    assert param.buckets.multiple_of == side and {1, 81} <= {frames for frames, _, _ in param.sizes}


def test_wan_examples_are_clips_of_a_budget(tmp_path):
    data = read(tmp_path, copy.deepcopy(WAN))
    param = data.dataset_param
    assert (param.data_folder, param.json_path) == ("videos", "videos/annotation.json")
    assert param.buckets == Budget(399360, 16, 5.0, tuple(range(1, 82, 4)))
    assert (param.train_fps, param.clip_start, param.caption_dropout_prob) == (None, "random", 0.0)
    assert param.skip_bad_clips and data.dataloader_param == DataloaderParam(shuffle=True)
    assert (81, 480, 832) in param.sizes and (1, 624, 624) in param.sizes


def test_defaults_of_mindspeed_mm_are_kept_and_keys_of_both_mixed(tmp_path):
    content = copy.deepcopy(WAN)
    video = {"video_processor_type": "OpensoraplanVideoProcessor", "num_frames": 31}
    content["dataset_param"]["preprocess_parameters"] = video
    content["dataset_param"]["basic_parameters"] = {"data_path": "a.json", "data_folder": "d"}
    content["dataloader_param"] = {"dataloader_mode": "base"}
    data = read(tmp_path, content)
    param = data.dataset_param
    assert (param.num_frames, param.max_height, param.max_width, param.train_fps) == (29, 480, 640, 24)
    assert param.caption_dropout_prob == 0.1 and not data.dataloader_param.shuffle
    content = changed("dataset_param", "buckets", [[9, 64, 64]])
    content["dataset_param"] |= {"clip_start": "first", "bucket_group": 4, "valid_fraction": 0.1}
    param = read(tmp_path, content).dataset_param
    assert (param.buckets, param.clip_start, param.bucket_group) == (((9, 64, 64),), "first", 4)


@pytest.mark.parametrize("sampler", ["stateful_distributed_sampler", "BaseRandomBatchSampler", "SequentialSampler"])
def test_samplers_of_an_order_alone_are_one(tmp_path, sampler):
    assert read(tmp_path, changed("dataloader_param", "sampler_type", sampler)).dataloader_param.shuffle


PREPROCESS = "dataset_param.preprocess_parameters"


@pytest.mark.parametrize(("section", "refused"), [
    ("dataloader_param", {"dataloader_mode": ("variable", "fast"), "sampler_type": ("BucketBatchSampler", "AESampler"),
                          "drop_last": (False,), "group_frame": (True,), "data_sharding": (True,),
                          "collate_param": ({},)}),
    ("dataset_param", {"dataset_type": ("feature",), "use_img_num": (4,)}),
    ("dataset_param.basic_parameters", {"data_path": ("/none/data.txt",)}),
    (PREPROCESS, {"speed_factor": (2.0,), "drop_short_ratio": (0.5,), "frame_interval": (2,), "max_hxw": (None,),
                  "force_resolution": (True,), "min_num_frames": (82,), "vae_scale_factor": ([0, 8, 8], []),
                  "video_processor_type": ("VACEVideoProcessor",)}),
])  # fmt: skip
def test_keys_that_cannot_be_kept_are_refused_by_name(tmp_path, section, refused):
    for key, value in ((key, value) for key, values in refused.items() for value in values):
        content = changed(*f"{section}.{key}".split(".", 1), value)
        pytest.raises(ConfigError, read, tmp_path, content).match(key)


@pytest.mark.parametrize("lines", ["a, a.json\nb, b.json\n", "a.json\n", ""])
def test_list_of_other_than_one_annotation_is_refused(tmp_path, lines):
    pytest.raises(ConfigError, read, tmp_path, copy.deepcopy(WAN), lines).match("FOLDER,ANNOTATION")


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
