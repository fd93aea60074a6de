"""What a newcomer does, from two folders of images to a score and to a folder that plain diffusers draws from."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.framework import activate
from tests.autoencoder_kl_fixtures import SMALL, our_shapes, write_folder
from tests.checkpoint.test_pipeline import drawn_here, drawn_there
from tests.checkpoint_fixtures import needs_diffusers
from tests.conftest import ROOT
from tests.inception_fixtures import write_random_weights
from tests.photographs_fixtures import cut_photographs
from tests.tools.tables import table
from tests.training.launch import Configs

SHORT = "--host standalone --train-iters 4 --eval-interval 2 --report always --report-steps 2"


@pytest.mark.extended
@needs_diffusers
def test_images_become_a_config_a_model_and_a_score(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    activate("pytorch")
    cut_photographs(tmp_path / "images")
    write_folder(tmp_path / "vae", SMALL, our_shapes(SMALL))
    flags = "--vae vae --diffusion gaussian_diffusion --image-size 32 --device-memory-gib 8"
    assert main(f"init images --output config {flags}".split()) == 0
    said, label = capsys.readouterr().out, "encode once and train:"
    command = said[said.index(label) + len(label) :].replace("\\\n", " ").splitlines()[0]
    small = {"num_layers": 1, "hidden_size": 32, "num_heads": 2}
    Configs(tmp_path / "config").change("model.json", predictor=small)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(["bash", "-c", f"{command} {SHORT}"], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "60 of 60 images encoded" in run.stdout and "validation loss at iteration 4" in run.stdout
    assert {"samples.png", "loss.png"} <= {file.name for file in (tmp_path / "outputs/config").iterdir()}
    checkpoints = "outputs/config/checkpoints"
    assert main(["convert", checkpoints, "pipeline", "--to", "pipeline"]) == 0
    pipeline, there = drawn_there(tmp_path / "pipeline", [1, 0], monkeypatch)
    assert pipeline.labels == {"china": 0, "flower": 1} and there.shape == (2, 32, 32, 3)
    assert np.abs(there - drawn_here(checkpoints, [1, 0], 50)).max() <= 1  # of 255: rounding
    if importlib.util.find_spec("torch_fidelity") is None:
        pytest.skip("the score needs pip install --no-deps torch-fidelity; all before it passed")
    inception = write_random_weights(tmp_path / "inception.pth")
    flags = f"--num 10 --sampler ddim --steps 2 --reference images/china --inception {inception} --output report"
    assert main(["evaluate", "--checkpoint", checkpoints, *flags.split()]) == 0
    report = json.loads((tmp_path / "report/report.json").read_text())
    assert report["images"]["num"] == 10 and np.isfinite(report["judgement"]["scores"]["fid"])
    assert any("30 image(s) were scaled or cut to 32 x 32" in note for note in report["judgement"]["notes"])


@pytest.fixture(scope="module")
def run_of_alice(tmp_path_factory, digits_folder):
    """A run started with absolute paths from another folder than its files lie in."""
    home = tmp_path_factory.mktemp("home") / "alice"
    shutil.copytree(digits_folder, home / "digits")
    configs = Configs.create(home / "configs", home / "digits", hidden_size=32, num_layers=1, num_heads=2)
    flags = "--train-iters 4 --save-interval 2 --save-retain-interval 1 --micro-batch-size 8 --lr 1e-2"
    places = f"--save {home}/ck --tensorboard-dir {home}/tensorboard"
    outcome = configs.run(f"{flags} --power-ema-stds 0.05 0.1 {places}")
    assert outcome.code == 0, outcome.output
    return home / "ck"


@pytest.mark.extended
@table(
    "command",
    """
convert CHECKPOINT OUT/weights.pt
convert CHECKPOINT OUT/weights.safetensors
convert CHECKPOINT OUT/folder --to pytorch
convert CHECKPOINT OUT/there --to mindspore
convert CHECKPOINT OUT/hub --to diffusers
ema --checkpoint CHECKPOINT --std 0.07 --output OUT/ema.safetensors
ema --checkpoint CHECKPOINT --std 0.07 --output OUT/ema --to pytorch
sample --checkpoint CHECKPOINT --output OUT/page.html --num-per-class 1 --sampler ddim --steps 2
sample --checkpoint CHECKPOINT --output OUT/single/ --num-per-class 1 --sampler ddim --steps 2
sample --checkpoint CHECKPOINT --output OUT/samples.npz --num-per-class 1 --sampler ddim --steps 2
evaluate --checkpoint CHECKPOINT --output OUT/report --num 60 --reference digits --sampler ddim --steps 2
""",
)
def test_files_for_others_name_no_folder_of_this_machine(run_of_alice, tmp_path, command):
    assert b"alice" in (run_of_alice / "iter_0000004/run.json").read_bytes()  # (so that the run can be replayed)
    assert main(command.replace("CHECKPOINT", str(run_of_alice)).replace("OUT", str(tmp_path)).split()) == 0
    written = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert written and not [path for path, content in written.items() if b"alice" in content]
