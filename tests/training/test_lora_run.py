"""Runs that train adapters, or a part of a network: what is kept, and which base it was."""

import json
import shutil

import numpy as np
import pytest

from mindspeed_mm_dit.checkpoint import torch_dcp
from mindspeed_mm_dit.checkpoint.formats import read_weights
from mindspeed_mm_dit.checkpoint.store import ADAPTERS, BASE, CheckpointStore, read_facts
from mindspeed_mm_dit.cli.main import main

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
    assert not np.array_equal(
        found["ema.blocks.0.attn.qkv.lora_B.weight"], found["model.blocks.0.attn.qkv.lora_B.weight"]
    )
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
        (f"--init-from {base}", "holds adapters (LoRA), and this run trains the whole network"),
        (LORA, "add --init-from"),
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
        assert f"{other}: was trained on another model: {section}." in capsys.readouterr().err


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
