"""Runs that begin with weights of another network: the same on any number of ranks; a resume comes first."""

from __future__ import annotations

import os
import shutil
import subprocess

import numpy as np
import pytest
from PIL import Image

from mindspeed_mm_dit.checkpoint.adapting import begin, read_source
from mindspeed_mm_dit.checkpoint.formats import FORMATS
from mindspeed_mm_dit.checkpoint.state import State
from mindspeed_mm_dit.checkpoint.store import find_checkpoint, read_facts
from mindspeed_mm_dit.checkpoint.weights import read_weights
from mindspeed_mm_dit.configs.dit import DiTConfig
from mindspeed_mm_dit.configs.model import load_model_config
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.models.on_paper import parameters_of
from mindspeed_mm_dit.wings.mindspeed_mm.megatron.preflight import check_before_import
from mindspeed_mm_dit.wings.mindspeed_mm.native.commandline import parse, yaml_for
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
    outcome = configs.run(STEPS + f"--train-iters 3 --ema-decay 0.5 --save {folder / 'checkpoints'}")
    assert outcome.code == 0, outcome.output
    return folder / "checkpoints"


@pytest.fixture(scope="module")
def adapted(tmp_path_factory, few_digits):
    """The same digits in patches of 4, by a network without a variance."""
    return Configs.create(tmp_path_factory.mktemp("adapted"), few_digits, **SIZES, patch_size=4)


@pytest.fixture(scope="module")
def whole(source, adapted):
    """The losses of 4 steps from there, on one rank."""
    return adapted.run(STEPS + f"--train-iters 4 --init-from {source}").losses


def test_what_it_begins_with_is_said_and_weights_and_average_are_just_that(source, adapted, tmp_path):
    saved = tmp_path / "checkpoints"
    outcome = adapted.run(STEPS.replace("1e-3", "1e-30") + f"--train-iters 1 --save {saved} --init-from {source}")
    assert outcome.code == 0, outcome.output
    for line in (
        f"initial weights: {find_checkpoint(source)} (pytorch): 28 of 32 tensors as they are\n"
        "    pos_embed (1, 4, 32): computed anew for 2 x 2 patches\n"
        "    x_embedder.proj.weight (32, 1, 4, 4): resampled from patches of 2 to 4\n"
        "    final_layer.linear.weight (16, 32): resampled from patches of 2 to 4, the variance dropped\n",
        "    note: diffusion.prediction_type is 'epsilon' there and 'v_prediction' here\n",
    ):
        assert line in outcome.output, outcome.output
    here = load_model_config(adapted.folder / "model.json").predictor
    classes = read_facts(find_checkpoint(saved))["classes"]
    wanted = {name: value for name, value, _ in begin(read_source(source, here), here, classes, 1234)}
    for use_ema in (False, True):
        found = read_weights(find_checkpoint(saved), use_ema)
        assert all(found[name].tobytes() == value.tobytes() for name, value in wanted.items())
    np.testing.assert_array_equal(  # of the average of the source, not of the weights that were being trained
        wanted["blocks.0.mlp.fc1.weight"], read_weights(find_checkpoint(source))["blocks.0.mlp.fc1.weight"]
    )


def test_ranks_and_sharding_do_not_change_what_is_learned_of_it(source, adapted, whole):
    fsdp2 = adapted.folder / "fsdp2.yaml"
    fsdp2.write_text("sharding_size: auto\nsub_modules_to_wrap:\n  - predictor.blocks.{*}\n")
    flags = STEPS + f"--train-iters 4 --init-from {source} "
    assert len(whole) == 4
    for more in ("", f"--use-torch-fsdp2 --fsdp2-config-path {fsdp2}"):
        outcome = adapted.run(flags + more, 2)
        assert outcome.code == 0 and outcome.output.count("initial weights: ") == 1, outcome.output
        for iteration, loss in whole.items():
            assert outcome.losses[iteration] == pytest.approx(loss, rel=2e-6), iteration


def test_a_resume_comes_first_and_says_so(source, adapted, whole, tmp_path):
    saved = tmp_path / "checkpoints"
    flags = STEPS + f"--save {saved} --load {saved} --init-from "
    first = adapted.run(f"{flags} {source} --train-iters 2 --init-verbose")
    assert first.code == 0 and "    blocks.1.mlp.fc2.bias (32,): as it is\n" in first.output, first.output
    last = adapted.run(f"{flags} {tmp_path}/gone.pt --train-iters 4")
    assert (
        f"note: --init-from = {tmp_path}/gone.pt is not read: the run goes on from {saved}/iter_0000002" in last.output
    )
    assert first.losses | last.losses == whole


@pytest.mark.parametrize(("ranks", "name"), [(1, "gone.pt"), (2, "wide.pt")])
def test_what_cannot_be_taken_is_refused_before_there_is_a_model(adapted, tmp_path, ranks, name):
    wide = DiTConfig(input_size=8, num_classes=10, in_channels=1, hidden_size=48, num_layers=2, num_heads=2)
    FORMATS["pt"].write(tmp_path / "wide.pt", State({"model": random_arrays(parameters_of(wide).shapes(), 0)}))
    outcome = adapted.run(STEPS + f"--train-iters 1 --init-from {tmp_path / name}", ranks)
    assert outcome.code == 2 if ranks == 1 else outcome.code, outcome.output
    reason = {"gone.pt": "there is no such file", "wide.pt": "does not fit this model: hidden_size is 48 there"}[name]
    said = f"\nCheckpointError: --init-from = {tmp_path / name}: {reason}"
    assert outcome.output.count(said) == 1, outcome.output  # (torchrun repeats it, with a traceback)
    assert "building DiT model" not in outcome.output


def test_the_native_engine_is_told_of_it_and_the_old_route_refuses_it(tmp_path):
    flags = "--mm-model m --mm-data d --train-iters 9 --micro-batch-size 8 --lr 1 --init-from w.pt"
    words = flags.split()
    assert yaml_for(parse(words, 1), 1)["model"]["init_from"] == "w.pt"
    tools = tmp_path / "tools.json"
    tools.write_text("{}")
    with pytest.raises(
        ConfigError,
        match=r"--init-from = w\.pt: is not acted on in this host: MindSpeed-MM can only start from random weights",
    ):
        check_before_import([*words, "--mm-tool", str(tools)])


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
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    line = "y_embedder.embedding_table.weight (3, 32): 2 of 2 classes drawn anew, the null class kept"
    assert "31 of 32 tensors as they are" in done.stdout and line in done.stdout, done.stdout
    assert (tmp_path / "outputs/cat_dog/samples.png").is_file()
