"""Checkpoints, caches and configs of version 0.2.0 still work, with its digits (tests/data/before/README.md)."""

import json
import shutil

import numpy as np
import pytest

pytest.importorskip("av", reason="requirements/video.txt")
pytest.importorskip("transformers", reason="requirements/video.txt")
pytest.importorskip("pyarrow", reason="requirements/parquet.txt")

from mindspeed_mm_dit.cli.main import main
from tests.before.runs import assert_same_lines, assert_same_validations, run, run_on_mindspore
from tests.conftest import GOLDEN, ROOT
from tests.mindspore import launch as mindspore

pytestmark = pytest.mark.ranks

BEFORE = ROOT / "tests" / "data" / "before"
EXPECTED = json.loads((BEFORE / "expected.json").read_text())
STEPS = "--global-batch-size 8 --lr 2e-2 --lr-decay-style cosine --lr-decay-iters 8 --ema-decay 0.5 --log-interval 1 "
RESUMED = STEPS + "--train-iters 7 --eval-interval 7 --eval-iters 1 --load {name}/checkpoints "
BEGUN = STEPS + "--train-iters 3 --eval-interval 3 --eval-iters 1 "
KINDS = ("folders", "labels_csv", "single_class", "parquet", "webdataset")
RUNS = {
    **{name: f"--mm-model {name}/model.json --mm-data {name}/data.json {RESUMED.format(name=name)}"
       for name in ("images", "videos")},
    **{name: f"--mm-model {name}/model.json --mm-data {name}/data.json {BEGUN}"
       for name in ("latents", "latents_fp16", "features", "features_wan")},
    **{kind: f"--mm-model data_kinds/model.json --mm-data data_kinds/{kind}.json {STEPS} --train-iters 2"
       for kind in KINDS},
}  # fmt: skip
ON_MINDSPORE = (
    "--mm-model latents_fp16/model.json --mm-data latents_fp16/data.json --power-ema-stds 0.05 0.1 "
    + RESUMED.format(name="latents_fp16")
)
SAMPLES = {
    "images": "--checkpoint images/checkpoints --classes disc,diamond --sampler ddpm",
    "videos": "--checkpoint videos/checkpoints --prompt a_seven_moves_left --prompt a_one_moves_up --sampler unipc",
    "safetensors": "--checkpoint latents/converted.safetensors --classes 0-1 --sampler heun",
    "pt": "--checkpoint latents/converted.pt --weights model --classes 0-1 --sampler euler",
    "mindspore": "--checkpoint latents_fp16/checkpoints --classes disc,diamond --sampler dpm++",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A copy of what is kept, which a run may write beside."""
    folder = tmp_path_factory.mktemp("before") / "dit"
    shutil.copytree(BEFORE, folder)
    shutil.copytree(GOLDEN / "wan_vae_tiny", folder / "wan_vae_tiny")
    return folder


def assert_same(outcome, expected):
    assert_same_lines(outcome, expected["lines"])
    assert_same_validations(outcome, expected["validations"])
    assert "changed since the checkpoint" not in outcome.output


@pytest.mark.parametrize("name", RUNS)
def test_run_on_older_files_prints_their_losses(place, name):
    assert_same(run(place, RUNS[name]), EXPECTED["runs"][name])


@mindspore.needs_mindspore
def test_older_mindspore_checkpoint_is_resumed(place):
    assert_same(run_on_mindspore(place, ON_MINDSPORE), EXPECTED["runs"]["mindspore"])


@pytest.mark.parametrize("name", SAMPLES)
def test_older_checkpoint_draws_its_samples(place, monkeypatch, name):
    monkeypatch.chdir(place)
    flags = [word.replace("_", " ") if word.startswith("a_") else word for word in SAMPLES[name].split()]
    common = ["--steps", "4", "--cfg-scale", "50", "--seed", "5", "--output", f"{name}.npz"]
    assert main(["sample", *flags, *common]) == 0
    with np.load(f"{name}.npz") as found, np.load(BEFORE / "samples" / f"{name}.npz") as expected:
        assert found["arr_1"].tolist() == expected["arr_1"].tolist()
        assert found["arr_0"].shape == expected["arr_0"].shape and found["arr_0"].dtype == np.uint8
        # a level on the edge may round the other way on another processor
        assert np.abs(found["arr_0"].astype(int) - expected["arr_0"]).max() <= 1
