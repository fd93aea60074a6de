"""Runs that begin with other weights: adapters beside a base, frozen parts, and weights of another network."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mindspeed_mm_dit.checkpoint import torch_dcp
from mindspeed_mm_dit.checkpoint.adapting import adapt_weights, read_source
from mindspeed_mm_dit.checkpoint.formats import FORMATS, read_weights
from mindspeed_mm_dit.checkpoint.state import State
from mindspeed_mm_dit.checkpoint.store import ADAPTERS, BASE, CheckpointStore, find_checkpoint, read_facts
from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.configs.dit import DiTConfig
from mindspeed_mm_dit.configs.model import load_model_config
from mindspeed_mm_dit.models.meta import parameters_of
from tests.autoencoder_kl_fixtures import SMALL, our_shapes, write_folder
from tests.checkpoint_fixtures import random_arrays
from tests.conftest import ROOT
from tests.forked import PATIENCE_SECONDS
from tests.training.launch import Configs

pytestmark = pytest.mark.ranks

FLAGS = "--global-batch-size 16 --lr 1e-2 --lr-decay-style constant --num-workers 0 --ema-decay 0.5 "
LORA = "--lora-target-modules attn.qkv blocks.{*}.mlp.fc1 --lora-r 4 --lora-alpha 8 "
TRAINED = {f"blocks.{i}.{layer}.lora_{m}.weight" for i in (0, 1) for layer in ("attn.qkv", "mlp.fc1") for m in "AB"}


@pytest.fixture(scope="module")
def base(tiny):
    tiny.done(FLAGS + f"--train-iters 6 --save {tiny.folder / 'base'}")
    return tiny.folder / "base"


@pytest.fixture(scope="module")
def whole(tiny, base):
    """Six steps of adapters beside it, on one rank: what was said, and where they are."""
    save = tiny.folder / "whole"
    saving = f"--init-from {base} --train-iters 6 --save {save} --save-interval 3 --keep-last 3"
    outcome = tiny.done(FLAGS + LORA + saving)
    return outcome, CheckpointStore(save)


def tensors(path):
    return {name: tensor.numpy() for name, tensor in torch_dcp.read_tree(path).items()}


def test_a_checkpoint_holds_adapters_their_average_and_state_and_the_digest_of_the_base(whole):
    outcome, store = whole
    found = tensors(store.path(6))
    assert {name[6:] for name in found if name.startswith("model.")} == TRAINED
    assert {name[4:] for name in found if name.startswith("ema.")} == TRAINED
    moments = {name[16:].rpartition(".")[0] for name in found if name.startswith("optimizer.state.")}
    assert moments == TRAINED
    name = "blocks.0.attn.qkv.lora_B.weight"
    assert not np.array_equal(found[f"ema.{name}"], found[f"model.{name}"])
    facts = read_facts(store.path(6))[ADAPTERS]
    assert len(facts.pop(BASE)) == 64 and facts.pop("base_from").endswith("base")
    assert facts == {"--lora-target-modules": ["attn.qkv", "blocks.{*}.mlp.fc1"], "--lora-r": 4, "--lora-alpha": 8.0}
    assert "frozen, with adapters in 4 layers" in outcome.output
    assert outcome.losses[6] != outcome.losses[1]


def test_adapters_go_on_beside_their_own_base_as_they_were_made(tiny, base, whole, tmp_path):
    assert tiny.run(FLAGS + f"--train-iters 1 --save {tmp_path / 'other'}").code == 0
    one, both = "--lora-target-modules attn.qkv ", "--lora-target-modules attn.qkv blocks.{*}.mlp.fc1 "
    for flags, named in (
        (f"{LORA} --init-from {tmp_path / 'other'}", "is not the base of the adapters in"),
        (f"{both} --lora-alpha 8 --init-from {base}", "--lora-r = 8"),
        (f"{one} --lora-r 4 --lora-alpha 8 --init-from {base}", "--lora-target-modules = attn.qkv"),
        (f"--init-from {base}", "holds adapters (LoRA), but this run trains the whole network"),
        (LORA, "Add --init-from"),
    ):
        outcome = tiny.run(f"{FLAGS} {flags} --train-iters 7 --load {whole[1].root} --save {tmp_path / 'new'}")
        assert outcome.code == 2 and named in outcome.output and not outcome.losses, outcome.output


def test_samples_with_adapters_are_alike_from_every_form(base, whole, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = whole[1].root

    def drawn(checkpoint, *loras):
        flags = [word for lora in loras for word in ("--lora", str(lora))]
        chain = ["--classes", "0-3", "--num-per-class", "1", "--sampler", "ddim", "--steps", "5", "--cfg-scale", "1"]
        assert main(["sample", "--checkpoint", str(checkpoint), *flags, *chain, "--output", "drawn.npz"]) == 0
        with np.load("drawn.npz") as file:
            return file["arr_0"].tobytes()

    without, adapted = drawn(base), drawn(base, run)
    assert adapted != without
    assert drawn(base, f"{run}:0") == drawn(base, f"{run}:2", f"{run}:-2") == without
    assert drawn(run) == adapted  # (which finds its base)
    for form, target in (("diffusers", "d"), ("peft", "p"), ("kohya", "k.safetensors")):
        assert main(["convert", str(run), target, "--to", form]) == 0
        assert drawn(base, target) == adapted
    assert main(["convert", str(base), "merged.safetensors", "--merge-lora", str(run)]) == 0
    assert drawn("merged.safetensors") == adapted


@pytest.mark.parametrize(
    ("section", "change"), [("diffusion", {"model_id": "flow_matching"}), ("predictor", {"num_heads": 4})]
)
def test_adapters_of_another_model_of_like_shapes_are_refused(base, whole, tmp_path, capsys, section, change):
    other = tmp_path / "other"
    shutil.copytree(whole[1].path(6), other)
    (other / "checksums.json").unlink()
    facts = json.loads((other / "run.json").read_text())
    facts["model"][section] = change if section == "diffusion" else facts["model"][section] | change
    (other / "run.json").write_text(json.dumps(facts))
    for command in (
        f"sample --checkpoint {base} --lora {other} --classes 0 --output {tmp_path}/x.npz",
        f"convert {base} {tmp_path}/x.safetensors --merge-lora {other}",
    ):
        assert main(command.split()) == 2
        assert f"{other} was trained on another model: {section}." in capsys.readouterr().err


def test_a_base_that_has_moved_or_changed_is_named(base, whole, tmp_path, capsys):
    moved = tmp_path / "run"
    shutil.copytree(whole[1].root, moved)
    path = moved / "iter_0000006"
    facts = json.loads((path / "run.json").read_text())
    (path / "checksums.json").unlink()
    assert main(["convert", str(base), str(tmp_path / "other.pt"), "--weights", "model"]) == 0  # (not the average)
    for place, words in (
        ("nowhere", "their base is not at"),
        ("other.pt", "is not the base model they were trained on"),
    ):
        facts["adapters"]["base_from"] = str(tmp_path / place)
        (path / "run.json").write_text(json.dumps(facts))
        chain = ["--classes", "0", "--steps", "2", "--output", str(tmp_path / "x.npz")]
        assert main(["sample", "--checkpoint", str(moved), *chain]) == 2
        said = capsys.readouterr().err
        assert words in said and f"--checkpoint BASE --lora {path}" in said


def test_what_is_frozen_stays_and_has_no_state_and_is_saved(tiny, base, tmp_path):
    save = tmp_path / "frozen"
    flags = FLAGS + f"--init-from {base} --freeze blocks.{{0}} y_embedder --save {save} --load {save} "
    assert tiny.run(flags + "--train-iters 2").code == 0
    tiny.done(flags + "--train-iters 4", ranks=2)
    found, before = tensors(save / "iter_0000004"), read_weights(base / "iter_0000006")
    for name, array in before.items():
        is_frozen = name.startswith(("blocks.0.", "y_embedder.", "pos_embed"))
        for tree in ("model", "ema"):
            assert np.array_equal(found[f"{tree}.{name}"], array) == is_frozen, (tree, name)
        assert (f"optimizer.state.{name}.exp_avg" in found) != is_frozen
    other = tiny.run(FLAGS + f"--train-iters 5 --load {save}")
    assert other.code == 2 and "--freeze" in other.output and "--no-load-optim" in other.output


BEGUN = "--global-batch-size 16 --lr 1e-3 --lr-decay-style constant --weight-decay 0 --num-workers 0 "
SIZES = {"hidden_size": 32, "num_layers": 2, "num_heads": 2}


@pytest.fixture(scope="module")
def source(tmp_path_factory, few_digits):
    """The checkpoints of a short run on digits in patches of 2, which learns its variance."""
    folder = tmp_path_factory.mktemp("source")
    configs = Configs.create(folder / "configs", few_digits, **SIZES, patch_size=2, learn_sigma=True)
    configs.change("model.json", diffusion={"model_id": "gaussian_diffusion"})
    configs.done(BEGUN + f"--train-iters 3 --ema-decay 0.5 --save {folder / 'checkpoints'}")
    return folder / "checkpoints"


@pytest.fixture(scope="module")
def adapted(tmp_path_factory, few_digits):
    return Configs.create(tmp_path_factory.mktemp("adapted"), few_digits, **SIZES, patch_size=4)


@pytest.fixture(scope="module")
def whole_begun(source, adapted):
    return adapted.run(BEGUN + f"--train-iters 4 --init-from {source}").losses


def test_what_it_begins_with_is_said_and_weights_and_average_are_just_that(source, adapted, tmp_path):
    saved = tmp_path / "checkpoints"
    outcome = adapted.done(BEGUN.replace("1e-3", "1e-30") + f"--train-iters 1 --save {saved} --init-from {source}")
    assert "28 of 32 tensors as they are" in outcome.output, outcome.output
    here = load_model_config(adapted.folder / "model.json").predictor
    classes = read_facts(find_checkpoint(saved))["classes"]
    wanted = {name: value for name, value, _ in adapt_weights(read_source(source, here), here, classes, 1234)}
    for use_ema in (False, True):
        found = read_weights(find_checkpoint(saved), use_ema)
        assert all(found[name].tobytes() == value.tobytes() for name, value in wanted.items())
    name = "blocks.0.mlp.fc1.weight"  # of the average of the source, not of the weights that were being trained
    np.testing.assert_array_equal(wanted[name], read_weights(find_checkpoint(source))[name])


def test_a_resume_comes_first_and_says_so(source, adapted, whole_begun, tmp_path):
    saved = tmp_path / "checkpoints"
    flags = BEGUN + f"--save {saved} --load {saved} --init-from "
    first = adapted.run(f"{flags} {source} --train-iters 2")
    last = adapted.run(f"{flags} {tmp_path}/gone.pt --train-iters 4")
    assert f"--init-from = {tmp_path}/gone.pt is not read" in last.output
    assert first.losses | last.losses == whole_begun


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
    said = {"capture_output": True, "text": True, "timeout": PATIENCE_SECONDS}
    done = subprocess.run(command, cwd=tmp_path, env=environment, **said)
    assert done.returncode == 0, done.stdout + done.stderr
    line = "y_embedder.embedding_table.weight (3, 32): 2 of 2 classes randomly initialised"
    for words in ("31 of 32 tensors as they are", line, "the unconditional class kept"):
        assert words in done.stdout, done.stdout
    assert (tmp_path / "outputs/cat_dog/samples.png").is_file()
