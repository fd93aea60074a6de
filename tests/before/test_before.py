"""Checkpoints, caches and configs of version 0.1.0 still work, with its digits (tests/data/before/README.md)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("av", reason="requirements/video.txt")
pytest.importorskip("transformers", reason="requirements/video.txt")
pytest.importorskip("pyarrow", reason="requirements/parquet.txt")

from mindspeed_mm_dit.cli.main import main
from tests.before.together import run_together
from tests.conftest import GOLDEN, ROOT
from tests.training.launch import Outcome

pytestmark = pytest.mark.ranks

BEFORE = ROOT / "tests" / "data" / "before"
EXPECTED = json.loads((BEFORE / "expected.json").read_text())
LOSS_TOLERANCE = 2e-5
"""Relative. On one machine the digits are the same; another processor's matrix products round otherwise."""
NORM_TOLERANCE = 1.5e-3
"""Absolute: norms are printed with three digits behind the point."""

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
ON_MINDSPORE = {
    "mindspore": f"--mm-model latents_fp16/model.json --mm-data latents_fp16/data.json --power-ema-stds 0.05 0.1 "
    f"{RESUMED.format(name='latents_fp16')}"
}
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


@pytest.fixture(scope="module")
def runs(place):
    return run_together(place, RUNS)


def same_lines(outcome: Outcome, expected: dict) -> None:
    """Compare learning rates as text, and losses, norms and validations by what rounding leaves of their digits."""
    assert outcome.code == 0, outcome.output
    assert list(map(str, outcome.lines)) == list(expected["lines"]), outcome.output
    for iteration, (rate, loss, norm) in expected["lines"].items():
        found = outcome.lines[int(iteration)]
        assert found[0] == rate and float(found[1]) == pytest.approx(float(loss), rel=LOSS_TOLERANCE), iteration
        assert float(found[2]) == pytest.approx(float(norm), abs=NORM_TOLERANCE), iteration
    found = {str(iteration): list(map(float, values)) for iteration, values in outcome.validations.items()}
    assert found.keys() == expected["validations"].keys()
    for iteration, values in expected["validations"].items():
        assert found[iteration] == pytest.approx(list(map(float, values)), rel=LOSS_TOLERANCE), iteration


@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_what_was_written_before_prints_the_losses_of_before(runs, name):
    same_lines(runs[name], EXPECTED["runs"][name])
    assert "changed since the checkpoint" not in runs[name].output


def test_a_checkpoint_of_mindspore_is_resumed_with_the_losses_of_before(place):
    python = os.environ.get("MM_DIT_MINDSPORE_PYTHON", "")
    if not Path(python).is_file():
        pytest.skip("MM_DIT_MINDSPORE_PYTHON names no interpreter")
    command = [python, str(ROOT / "pretrain_dit.py"), "--host", "standalone", "--ai-framework", "mindspore"]
    done = subprocess.run(
        [*command, *ON_MINDSPORE["mindspore"].split()], cwd=place, text=True, timeout=300, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": str(ROOT), "GLOG_v": "3"},
    )  # fmt: skip
    same_lines(Outcome(done.returncode, done.stdout), EXPECTED["runs"]["mindspore"])
    assert "changed since the checkpoint" not in done.stdout


@pytest.mark.parametrize("name", SAMPLES)
def test_a_checkpoint_of_before_draws_the_samples_of_before(place, monkeypatch, name):
    monkeypatch.chdir(place)
    flags = [word.replace("_", " ") if word.startswith("a_") else word for word in SAMPLES[name].split()]
    common = ["--steps", "4", "--cfg-scale", "50", "--seed", "5", "--output", f"{name}.npz"]
    assert main(["sample", *flags, *common]) == 0
    with np.load(f"{name}.npz") as found, np.load(BEFORE / "samples" / f"{name}.npz") as expected:
        assert found["arr_1"].tolist() == expected["arr_1"].tolist()
        assert found["arr_0"].shape == expected["arr_0"].shape and found["arr_0"].dtype == np.uint8
        # a level on the edge may round the other way on another processor
        assert np.abs(found["arr_0"].astype(int) - expected["arr_0"]).max() <= 1
