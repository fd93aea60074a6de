"""Runs that begin with weights of another network: the same on any number of ranks; a resume comes first."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mindspeed_mm_dit.checkpoint.adapting import adapt_weights, read_source
from mindspeed_mm_dit.checkpoint.formats import FORMATS, read_weights
from mindspeed_mm_dit.checkpoint.state import State
from mindspeed_mm_dit.checkpoint.store import find_checkpoint, read_facts
from mindspeed_mm_dit.configs.dit import DiTConfig
from mindspeed_mm_dit.configs.model import load_model_config
from mindspeed_mm_dit.models.meta import parameters_of
from tests.autoencoder_kl_fixtures import SMALL, our_shapes, write_folder
from tests.checkpoint_fixtures import random_arrays
from tests.conftest import ROOT
from tests.forked import PATIENCE_SECONDS
from tests.training.launch import Configs

pytestmark = pytest.mark.ranks
STEPS = "--global-batch-size 16 --lr 1e-3 --lr-decay-style constant --weight-decay 0 --num-workers 0 "
SIZES = {"hidden_size": 32, "num_layers": 2, "num_heads": 2}


@pytest.fixture(scope="module")
def source(tmp_path_factory, few_digits):
    """The checkpoints of a short run on digits in patches of 2, which learns its variance."""
    folder = tmp_path_factory.mktemp("source")
    configs = Configs.create(folder / "configs", few_digits, **SIZES, patch_size=2, learn_sigma=True)
    configs.change("model.json", diffusion={"model_id": "gaussian_diffusion"})
    configs.done(STEPS + f"--train-iters 3 --ema-decay 0.5 --save {folder / 'checkpoints'}")
    return folder / "checkpoints"


@pytest.fixture(scope="module")
def adapted(tmp_path_factory, few_digits):
    return Configs.create(tmp_path_factory.mktemp("adapted"), few_digits, **SIZES, patch_size=4)


@pytest.fixture(scope="module")
def whole(source, adapted):
    return adapted.run(STEPS + f"--train-iters 4 --init-from {source}").losses


def test_what_it_begins_with_is_said_and_weights_and_average_are_just_that(source, adapted, tmp_path):
    saved = tmp_path / "checkpoints"
    outcome = adapted.done(STEPS.replace("1e-3", "1e-30") + f"--train-iters 1 --save {saved} --init-from {source}")
    assert "28 of 32 tensors as they are" in outcome.output, outcome.output
    here = load_model_config(adapted.folder / "model.json").predictor
    classes = read_facts(find_checkpoint(saved))["classes"]
    wanted = {name: value for name, value, _ in adapt_weights(read_source(source, here), here, classes, 1234)}
    for use_ema in (False, True):
        found = read_weights(find_checkpoint(saved), use_ema)
        assert all(found[name].tobytes() == value.tobytes() for name, value in wanted.items())
    np.testing.assert_array_equal(  # of the average of the source, not of the weights that were being trained
        wanted["blocks.0.mlp.fc1.weight"], read_weights(find_checkpoint(source))["blocks.0.mlp.fc1.weight"]
    )


def test_a_resume_comes_first_and_says_so(source, adapted, whole, tmp_path):
    saved = tmp_path / "checkpoints"
    flags = STEPS + f"--save {saved} --load {saved} --init-from "
    first = adapted.run(f"{flags} {source} --train-iters 2")
    last = adapted.run(f"{flags} {tmp_path}/gone.pt --train-iters 4")
    assert f"--init-from = {tmp_path}/gone.pt is not read" in last.output
    assert first.losses | last.losses == whole


@pytest.mark.extended
def test_cat_dog_fine_tunes_published_weights(tmp_path):
    """With small weights of the published names and a small VAE, made here."""
    config, weights = tmp_path / "config", tmp_path / "weights"
    shutil.copytree(ROOT / "examples/dit/cat_dog", config)
    Configs(config).change("model.json", predictor=SIZES)
    published = DiTConfig(input_size=32, num_classes=1000, **SIZES)
    shapes = parameters_of(published).shapes()
    weights.mkdir()
    arrays = {name: array * np.float32(0.02) for name, array in random_arrays(shapes, 0).items()}
    FORMATS["pt"].write(weights / "DiT-XL-2-256x256.pt", State({"model": arrays}))
    vae = SMALL | {"block_out_channels": [8] * 4, "down_block_types": ["DownEncoderBlock2D"] * 4,
                   "up_block_types": ["UpDecoderBlock2D"] * 4, "scaling_factor": 0.18215}  # fmt: skip
    write_folder(weights / "sd-vae-ft-ema", vae, our_shapes({k: v for k, v in vae.items() if k != "scaling_factor"}))
    pictures, rows = tmp_path / "data" / "cat_dog", ["image_path,label"]
    pictures.mkdir(parents=True)
    for number in range(8):
        Image.new("RGB", (256, 256), (number * 30, 99, 0)).save(pictures / f"{number}.png")
        rows.append(f"{number}.png,{('cat', 'dog')[number % 2]}")
    (pictures / "labels.csv").write_text("\n".join(rows) + "\n")
    command = ["bash", str(ROOT / "examples/dit/pretrain.sh"), "--host", "standalone", "--train-iters", "1"]
    command += ["--global-batch-size", "2", "--lr-warmup-iters", "0", "--report", "always", "--report-steps", "1"]
    environment = {**os.environ, "CONFIG": str(config), "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "VIRTUAL_ENV": "this one"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    line = (
        "y_embedder.embedding_table.weight (3, 32): 2 of 2 classes randomly initialised, the unconditional class kept"
    )
    assert "31 of 32 tensors as they are" in done.stdout and line in done.stdout, done.stdout
    assert (tmp_path / "outputs/cat_dog/samples.png").is_file()
