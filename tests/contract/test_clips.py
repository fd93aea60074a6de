"""Text to video in the real MindSpeed-MM, by either of its routes, against our own host."""

import json
import math
import shutil

import numpy as np
import pytest

pytest.importorskip("av", reason="requirements/video.txt")
pytest.importorskip("transformers", reason="requirements/video.txt")

from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.framework.torch_file import write_torch_file
from tests.clips_fixtures import clip_configs, write_clips
from tests.contract.hosted import TwoHosts, needs_trees, train_in_sora
from tests.contract.native_hosted import NativeAndStandalone, needs_engine

CLOSE = {"rel": 2e-6}


@pytest.fixture(scope="module", params=["custom_dit", "wan"])
def features(tmp_path_factory, request):
    """A folder with model.json and data.json of cached clips."""
    location = tmp_path_factory.mktemp("clips")
    clips = write_clips(location)
    files = clip_configs(location / "files", clips).folder
    names = ("--model", str(files / "model.json"), "--data", str(files / "data.json"))
    assert main(["cache-latents", *names, "--output", str(location / "cache")]) == 0
    return clip_configs(location / "features", clips, request.param, features=str(location / "cache")).folder


def hold(runs, features):
    """Put the configs of clips in the place of those of digits."""
    for name in ("model.json", "data.json"):
        shutil.copy(features / name, runs.folder / name)
    (runs.folder / "fsdp2.yaml").write_text("sharding_size: auto\nsub_modules_to_wrap: ['predictor.blocks.{*}']\n")


@needs_trees
@pytest.mark.parametrize("ranks", [1, 2])
def test_clips_teach_the_same_by_the_old_route(features, tmp_path, digits_folder, ranks):
    runs = TwoHosts(tmp_path, digits_folder)
    hold(runs, features)
    there, here = (runs.train(host, 3, ranks=ranks) for host in ("mindspeed-mm", "standalone"))
    assert there.losses.keys() == here.losses.keys() == {1, 2, 3}, there.output + here.output
    assert there.losses == pytest.approx(here.losses, **CLOSE)


@needs_trees
def test_script_of_the_host_trains_the_model_of_its_tutorial(tmp_path):
    random, folder = np.random.default_rng(0), tmp_path / "sora"
    folder.mkdir()
    for number in range(8):
        states = random.standard_normal((1, 7, 64), np.float32)
        sample = {"video": random.standard_normal((16, 2, 4, 4), np.float32), "prompt_ids": states}
        write_torch_file(folder / f"{number}.pt", {**sample, "prompt_mask": np.ones((1, 7), np.float32)})
    predictor = {"model_id": "custom_dit", "num_layers": 2, "num_heads": 2, "head_dim": 8, "text_dim": 64,
                 "freq_dim": 16, "ffn_dim": 24, "latent_size": [2, 4, 4]}  # fmt: skip
    flow = {"model_id": "wan_flow_match_scheduler", "shift": 5, "sigma_min": 0.0, "extra_one_step": True}
    data = {"dataset_type": "feature", "preprocess_parameters": {}}
    data["basic_parameters"] = {"data_path": str(folder / "index.json"), "data_folder": str(folder)}
    loader = {"dataloader_mode": "sampler", "shuffle": False, "drop_last": True}
    files = {
        "model.json": {"predictor": predictor, "diffusion": flow, "ae": {"model_id": "pixel"}, "task": "t2v",
                       "load_video_features": True, "load_text_features": True},
        "data.json": {"dataset_param": data, "dataloader_param": loader},
        "index.json": [{"file": f"{number}.pt"} for number in range(8)],
    }  # fmt: skip
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    (tmp_path / "fsdp2.yaml").write_text("sharding_size: auto\nsub_modules_to_wrap: ['predictor.blocks.{*}']\n")
    outcome = train_in_sora(tmp_path, 2)
    assert outcome.losses.keys() == {1, 2} and all(map(math.isfinite, outcome.losses.values())), outcome.output


@needs_engine
@pytest.mark.parametrize("ranks", [1, 2])
def test_clips_teach_the_same_in_the_native_engine(features, tmp_path, digits_folder, ranks):
    runs = NativeAndStandalone(tmp_path, digits_folder)
    hold(runs, features)
    there = runs.train("mindspeed-mm-native", 3, ranks=ranks, fsdp2=ranks > 1)
    here = runs.train("standalone", 3, fsdp2=False)
    assert there.losses.keys() == here.losses.keys() == {1, 2, 3}, there.output + here.output
    assert there.losses == pytest.approx(here.losses, **CLOSE)


@needs_engine
def test_ranks_share_the_tokens_of_a_clip_in_the_engine(features, tmp_path, digits_folder):
    runs = NativeAndStandalone(tmp_path, digits_folder)
    hold(runs, features)
    there = runs.train("mindspeed-mm-native", 3, "--context-parallel-size 2", ranks=2)
    here = runs.train("standalone", 3, fsdp2=False)
    assert there.losses.keys() == {1, 2, 3}, there.output
    assert there.losses == pytest.approx(here.losses, **CLOSE)
