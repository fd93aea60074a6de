"""Every format to every other and back, bit for bit; nothing is lost or replaced in silence."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from mindspeed_mm_dit.checkpoint.convert import convert
from mindspeed_mm_dit.checkpoint.formats import FORMATS, of_source, of_target
from mindspeed_mm_dit.checkpoint.shapes import vae_shapes
from mindspeed_mm_dit.checkpoint.state import State
from mindspeed_mm_dit.checkpoint.store import find_checkpoint, read_facts
from mindspeed_mm_dit.checkpoint.weights import read_weights
from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.errors import CheckpointError, ConfigError, PlatformError
from mindspeed_mm_dit.framework.mindspore_file import read_mindspore_file
from mindspeed_mm_dit.framework.torch_file import read_torch_file, write_torch_file
from mindspeed_mm_dit.models.autoencoder_kl.files import read_architecture
from tests.checkpoint_fixtures import (
    FACTS,
    FILE_NAMES,
    MODEL_JSON,
    TINY_VAE,
    assert_same,
    dit_arrays,
    needs_torch,
    random_arrays,
    training_state,
    write,
)
from tests.conftest import GOLDEN


def read(path):
    path = find_checkpoint(path)
    return FORMATS[of_source(path)].read(path)


def pairs(names):
    return [
        pytest.param(a, b, marks=needs_torch if "pytorch" in (a, b) else (), id=f"{a}-{b}")
        for a, b in permutations(names, 2)
    ]


@pytest.mark.parametrize(("first", "second"), pairs(name for name in FORMATS if name != "pipeline"))
def test_weights_survive_every_format_and_back(tmp_path, first, second):
    weights = dit_arrays()
    trees = {"model": weights, "ema": weights} if first in ("pytorch", "mindspore") else {"model": weights}
    source = write(tmp_path, first, State(trees, FACTS))
    target, back = tmp_path / "there" / FILE_NAMES.get(second, second), tmp_path / "back" / FILE_NAMES.get(first, first)
    convert(source, target, second, description=MODEL_JSON)
    convert(target, back, first, description=MODEL_JSON)
    assert_same(read(target).weights, weights)
    assert_same(read(back).weights, weights)
    if first not in ("pytorch", "mindspore", "pt", "ckpt"):
        for file in [source] if source.is_file() else source.iterdir():
            again = back if back.is_file() else back / file.name
            assert file.suffix == ".safetensors" or again.read_bytes() == file.read_bytes()


@pytest.mark.parametrize(("first", "second"), pairs(["pt", "safetensors", "ckpt", "diffusers"]))
def test_an_autoencoder_survives_every_format_and_back(tmp_path, first, second):
    weights = random_arrays(vae_shapes(TINY_VAE), 0)
    config = {
        "_class_name": "AutoencoderKL",
        "norm_num_groups": 4,
        "scaling_factor": 0.5,
        "block_out_channels": [8, 16],
    }
    source = write(tmp_path, first, State({"model": weights}, config=config))
    target, back = tmp_path / "there" / FILE_NAMES.get(second, second), tmp_path / "back" / FILE_NAMES.get(first, first)
    convert(source, target, second, description=config)
    convert(target, back, first, description=config)
    assert_same(read(target).weights, weights)
    assert_same(read(back).weights, weights)
    if second == "diffusers":
        assert json.loads((target / "config.json").read_text()) == config


def test_what_is_assumed_of_an_autoencoder_is_said(tmp_path):
    wide = dataclasses.replace(TINY_VAE, block_out_channels=(32, 64), norm_num_groups=32)
    write_torch_file(tmp_path / "a.pt", random_arrays(vae_shapes(wide), 0))
    done = convert(tmp_path / "a.pt", tmp_path / "guess", "diffusers")
    assert "norm_num_groups = 32 is assumed" in done.notes[0] and "scaling_factor is not known" in done.notes[0]
    assert "scaling_factor" not in read_architecture_json(tmp_path / "guess")
    model_json = {**MODEL_JSON, "ae": {"model_id": "autoencoder_kl", "from_pretrained": "x", "scaling_factor": 0.5}}
    convert(tmp_path / "a.pt", tmp_path / "a.safetensors", description=model_json)
    done = convert(tmp_path / "a.safetensors", tmp_path / "known", "diffusers")
    assert "is assumed" in done.notes[0] and "scaling_factor" not in done.notes[0]
    assert read_architecture_json(tmp_path / "known")["scaling_factor"] == 0.5
    done = convert(tmp_path / "known", tmp_path / "a.ckpt")
    assert "no room for config.json" in done.notes[0]

    write_torch_file(tmp_path / "b.pt", random_arrays(vae_shapes(TINY_VAE), 0))
    with pytest.raises(ConfigError, match=r"--model: is needed: .* 32 does not divide the widths 8, 16"):
        convert(tmp_path / "b.pt", tmp_path / "b", "diffusers")
    with pytest.raises(ConfigError, match="--model: is neither"):
        convert(tmp_path / "b.pt", tmp_path / "b", "diffusers", description={"norm_num_groups": 4})


def read_architecture_json(folder):
    read_architecture(folder / "config.json")
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(
    ("first", "second"),
    [pytest.param("pytorch", "mindspore", marks=needs_torch), pytest.param("mindspore", "pytorch", marks=needs_torch),
     ("mindspore", "ckpt")],
)  # fmt: skip
def test_a_run_keeps_optimizer_average_and_facts(tmp_path, first, second):
    state = training_state()
    source = write(tmp_path, first, state)
    target, back = tmp_path / "there" / FILE_NAMES.get(second, second), tmp_path / "back"
    convert(source, target, second)
    convert(target, back, first)
    for place in (target, back):
        for tree in ("model", "ema", "optimizer"):
            assert_same(read(place).trees[tree], state.trees[tree])
    if second != "ckpt":
        for root in (target, back):
            assert (root / "latest_checkpointed_iteration.txt").read_text() == "7"
            assert read_facts(root / "iter_0000007") == FACTS


@needs_torch
@pytest.mark.parametrize("owner", ["predictor.{name}", "{number}", "{name}"])
def test_a_run_of_mindspeed_mm_becomes_one_of_ours_whatever_it_calls_the_moments(tmp_path, owner):
    from mindspeed_mm_dit.checkpoint import torch_dcp

    state, moments = training_state(), {}
    trained = [name for name in state.trees["model"] if name != "pos_embed"]
    for number, name in enumerate(sorted(trained, key=lambda name: name.endswith(".bias"))):
        kinds = {kind: state.trees["optimizer"][f"state.{name}.{kind}"] for kind in ("exp_avg", "exp_avg_sq", "step")}
        own = kinds if owner == "{name}" else {kind: kinds[kind] for kind in ("exp_avg", "exp_avg_sq")}
        moments[owner.format(name=name, number=number)] = tensors(own)
    theirs = {"optimizer": {"state": moments, "param_groups": {str(group): {"step": 7} for group in range(2)}}}
    theirs["model"] = tensors({**state.trees["model"], **{f"ema.{name}": x for name, x in state.trees["ema"].items()}})
    theirs["rng_state"] = {"0": {"torch_rng_state": torch_dcp.as_tensor(np.arange(8))}}
    torch_dcp.write(theirs, tmp_path / "iter_0000007")
    convert(tmp_path / "iter_0000007", tmp_path / "ours", "pytorch")
    for tree in ("model", "ema", "optimizer"):
        assert_same(read(tmp_path / "ours").trees[tree], state.trees[tree])
    assert read_facts(tmp_path / "ours/iter_0000007") == {"iteration": 7}  # a run that was killed leaves no run.json


def tensors(arrays):
    from mindspeed_mm_dit.checkpoint import torch_dcp

    return {name: torch_dcp.as_tensor(array) for name, array in arrays.items()}


def test_both_sets_of_weights_stay_in_a_pt_and_facts_are_its_args(tmp_path):
    state = training_state()
    done = convert(write(tmp_path, "mindspore", state), tmp_path / "a.pt")
    content = read_torch_file(tmp_path / "a.pt")
    assert list(content) == ["model", "ema", "args"] and content["args"] == FACTS
    assert_same(content["ema"], state.trees["ema"])
    assert done.notes == ("left out: optimizer",)
    done = convert(tmp_path / "a.pt", tmp_path / "run", "mindspore")
    assert read_facts(find_checkpoint(tmp_path / "run")) == FACTS and "--no-load-optim" in done.notes[0]


@pytest.mark.parametrize("weights", [None, "ema", "model"])
def test_one_set_of_weights_is_the_average_unless_asked(tmp_path, weights):
    state = training_state()
    source = write(tmp_path, "mindspore", state)
    done = convert(source, tmp_path / "a.safetensors", weights=weights)
    assert_same(read(tmp_path / "a.safetensors").weights, state.trees[weights or "ema"])
    assert f"kept: {weights or 'ema'}" in done.notes[0]
    for use_ema, tree in ((True, "ema"), (False, "model")):
        assert_same(read_weights(find_checkpoint(source), use_ema), state.trees[tree])


def test_the_published_training_file_becomes_a_run_and_a_bare_file(tmp_path):
    published = read_torch_file(GOLDEN / "dit_tiny_p2.pt")
    convert(GOLDEN / "dit_tiny_p2.pt", tmp_path / "run", "mindspore")
    state = read(tmp_path / "run")
    assert_same(state.trees["model"], published["model"])
    assert_same(state.trees["ema"], published["ema"])
    convert(tmp_path / "run", tmp_path / "a.ckpt", weights="model")
    assert_same(read_mindspore_file(tmp_path / "a.ckpt"), published["model"])
    assert_same(read_weights(tmp_path / "a.ckpt"), published["model"])


# --- what is refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.pop("blocks.1.mlp.fc1.bias"), r"blocks\.1\.mlp\.fc1\.bias is missing"),
        (lambda a: a.update(extra=np.zeros(2, np.float32)), "extra is not in this model"),
        (lambda a: a.update({"blocks.0.attn.qkv.bias": np.zeros(2, np.float32)}), r"qkv\.bias is \(2,\), .*\(48,\)"),
        (lambda a: a.pop("pos_embed"), "pos_embed is missing"),
    ],
)
def test_missing_unknown_and_misshapen_tensors_are_named(tmp_path, change, message):
    arrays = dit_arrays()
    change(arrays)
    write_torch_file(tmp_path / "a.pt", arrays)
    with pytest.raises(CheckpointError, match=message):
        convert(tmp_path / "a.pt", tmp_path / "b.ckpt")
    assert not (tmp_path / "b.ckpt").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.pop("proj_out_1.bias"), r"proj_out_1\.bias is missing"),
        (lambda a: a.update({"proj_out_2.bias": np.zeros(2, np.float32)}), r"proj_out_2\.bias is \(2,\)"),
        (lambda a: a.update(extra=np.zeros(2, np.float32)), "extra is not in this model"),
        (
            lambda a: a.update({k: a[k] + 1 for k in a if "blocks.1.norm1.emb.class" in k}),
            "differs from block to block",
        ),
    ],
)
def test_the_same_goes_for_a_diffusers_folder(tmp_path, change, message):
    from safetensors.numpy import load_file, save_file

    folder = write(tmp_path, "diffusers", State({"model": dit_arrays()}, FACTS))
    arrays = load_file(folder / "diffusion_pytorch_model.safetensors")
    change(arrays)
    save_file(arrays, folder / "diffusion_pytorch_model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        convert(folder, tmp_path / "b.ckpt")


def test_the_only_variant_of_a_folder_is_read_and_one_of_several_is_to_be_chosen(tmp_path):
    folder = write(tmp_path, "diffusers", State({"model": dit_arrays()}, FACTS))
    weights, file = read(folder).weights, folder / "diffusion_pytorch_model.safetensors"
    half, other = file.with_suffix(".fp16.safetensors"), file.with_suffix(".bf16.safetensors")
    file.rename(half)
    assert_same(read(folder).weights, weights)
    other.write_bytes(half.read_bytes())
    with pytest.raises(CheckpointError, match=rf"holds {other.name} and {half.name}: keep one of them"):
        read(folder)
    half.unlink()
    other.rename(file.with_suffix(".gguf"))
    with pytest.raises(CheckpointError, match=r"holds none of .*: found config\.json, diffusion_pytorch_model\.gguf"):
        read(folder)


def test_an_autoencoders_and_an_optimizers_tensors_are_checked_too(tmp_path):
    vae = random_arrays(vae_shapes(TINY_VAE), 0)
    vae["decoder.up_blocks.1.resnets.2.conv1.bias"] = np.zeros(3, np.float32)
    write_torch_file(tmp_path / "a.pt", vae)
    with pytest.raises(CheckpointError, match=r"up_blocks\.1\.resnets\.2\.conv1\.bias is \(3,\)"):
        convert(tmp_path / "a.pt", tmp_path / "b.ckpt")
    state = training_state()
    del state.trees["optimizer"]["state.blocks.0.mlp.fc1.bias.step"]
    with pytest.raises(CheckpointError, match=r"'optimizer'.*fc1\.bias\.step is missing"):
        convert(write(tmp_path, "mindspore", state), tmp_path / "b.ckpt")


def test_nothing_is_replaced_unless_asked(tmp_path):
    write_torch_file(tmp_path / "a.pt", dit_arrays())
    (tmp_path / "b.ckpt").write_text("mine")
    with pytest.raises(CheckpointError, match="exists"):
        convert(tmp_path / "a.pt", tmp_path / "b.ckpt")
    assert (tmp_path / "b.ckpt").read_text() == "mine"
    convert(tmp_path / "a.pt", tmp_path / "b.ckpt", overwrite=True)
    convert(tmp_path / "a.pt", tmp_path / "run", "mindspore")
    convert(tmp_path / "a.pt", tmp_path / "run", "mindspore", overwrite=True)
    (tmp_path / "link").symlink_to("run")
    for _ in range(2):  # (the first takes the place of the link and leaves what it leads to)
        convert(tmp_path / "a.pt", tmp_path / "link", "mindspore", overwrite=True)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "me.jpg").write_text("mine")
    with pytest.raises(CheckpointError, match="a folder and no checkpoint"):
        convert(tmp_path / "a.pt", tmp_path / "photos", "mindspore", overwrite=True)
    with pytest.raises(CheckpointError, match="overlaps with SOURCE"):
        convert(tmp_path / "a.pt", tmp_path / "a.pt", overwrite=True)
    with pytest.raises(CheckpointError, match="overlaps with SOURCE"):
        convert(tmp_path / "run", tmp_path / "run", "mindspore", overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.pt", "b.ckpt", "link", "photos", "run"]


def test_a_disk_that_does_not_take_a_safetensors_file_is_no_error_of_its_library(tmp_path):
    with pytest.raises(OSError, match="No such file or directory"):
        FORMATS["safetensors"].write(tmp_path / "none/a.safetensors", State({"model": {"a": np.zeros(3)}}))


def test_a_failed_write_leaves_the_old_target_and_no_rest(tmp_path, monkeypatch):
    write_torch_file(tmp_path / "a.pt", dit_arrays())
    convert(tmp_path / "a.pt", tmp_path / "run", "mindspore")

    def full(path, state):
        (path / "half").write_text("half")
        raise OSError("No space left on device")

    monkeypatch.setitem(FORMATS, "mindspore", FORMATS["mindspore"]._replace(write=full))
    with pytest.raises(CheckpointError, match="No space left on device"):
        convert(tmp_path / "a.pt", tmp_path / "run", "mindspore", overwrite=True)
    assert_same(read(tmp_path / "run").weights, dit_arrays())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.pt", "run"]


@pytest.mark.parametrize(
    ("target", "to", "message"),
    [("folder", None, "--to diffusers|pytorch|mindspore|"), ("a.pt", "ckpt", r"end it in \.ckpt"),
     ("a.pt", "mindspore", "give a folder"), ("a", "onnx", "unknown format")],
)  # fmt: skip
def test_a_target_of_no_clear_format_is_refused(target, to, message):
    with pytest.raises(ConfigError, match=message):
        of_target(Path(target), to)


def test_a_form_of_adapters_is_none_of_whole_weights(tmp_path):
    source = write(tmp_path, "pt", State({"model": dit_arrays()}, FACTS))
    with pytest.raises(ConfigError, match="--to = peft: is a form of adapters"):
        convert(source, tmp_path / "a", "peft")


def test_unknown_and_missing_sources_are_refused(tmp_path):
    (tmp_path / "a.gguf").write_text("x")
    with pytest.raises(CheckpointError, match="no format known here"):
        convert(tmp_path / "a.gguf", tmp_path / "b.pt")
    with pytest.raises(CheckpointError, match="no such file or folder"):
        convert(tmp_path / "none", tmp_path / "b.pt")
    write_torch_file(tmp_path / "a.pt", {"w": np.zeros(2, np.float32)})
    with pytest.raises(CheckpointError, match="neither a known predictor nor an AutoencoderKL; its tensors are: w"):
        convert(tmp_path / "a.pt", tmp_path / "b.ckpt")


def test_the_number_of_heads_is_asked_for_where_nothing_tells_it(tmp_path):
    write_torch_file(tmp_path / "a.pt", dit_arrays())
    with pytest.raises(ConfigError, match="--model: is needed"):
        convert(tmp_path / "a.pt", tmp_path / "d", "diffusers")


def test_without_pytorch_its_folders_are_refused_by_name_and_the_rest_works(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.endswith("checkpoint.torch_dcp")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("mindspeed_mm_dit.checkpoint.torch_dcp", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    write_torch_file(tmp_path / "a.pt", dit_arrays())
    with pytest.raises(PlatformError, match="pip install torch"):
        convert(tmp_path / "a.pt", tmp_path / "run", "pytorch")
    convert(tmp_path / "a.pt", tmp_path / "run", "mindspore")
    folder = tmp_path / "theirs" / "iter_0000007"
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(b"")
    for use in (lambda: read_weights(folder), lambda: convert(folder, tmp_path / "b.pt")):
        with pytest.raises(PlatformError, match=r"theirs/iter_0000007: was written by PyTorch(?s:.*)mm-dit convert"):
            use()


def test_neither_framework_is_imported_for_files_and_mindspores_folders(tmp_path):
    write_torch_file(tmp_path / "a.pt", dit_arrays())
    code = (
        "import sys; sys.modules['torch'] = sys.modules['mindspore'] = None\n"
        "from mindspeed_mm_dit.cli.main import main\n"
        f"sys.exit(main(['convert', {str(tmp_path / 'a.pt')!r}, {str(tmp_path / 'run')!r}, '--to', 'mindspore']))"
    )
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr
    assert_same(read(tmp_path / "run").weights, dit_arrays())


def test_the_command_says_what_it_did(tmp_path, capsys):
    write_torch_file(tmp_path / "a.pt", dit_arrays())
    (tmp_path / "model.json").write_text(json.dumps(MODEL_JSON))
    arguments = [str(tmp_path / "a.pt"), str(tmp_path / "run"), "--to", "mindspore"]
    assert main(["convert", *arguments, "--model", str(tmp_path / "model.json")]) == 0
    output = capsys.readouterr()
    assert "reading" in output.err and "writing" in output.err
    assert "ema is a copy of model" in output.out and "(pt) -> " in output.out and "tensors," in output.out
    assert main(["convert", *arguments]) == 2
    assert "exists" in capsys.readouterr().err


@pytest.mark.parametrize("change", [{"hidden_size": 96}, {"num_layers": 2}, {"num_classes": 11}, {"patch_size": 4}])
def test_weights_are_not_kept_with_the_description_of_another_network(tmp_path, change):
    predictor = {"model_id": "dit", "in_channels": 4, "hidden_size": 64, "num_layers": 3, "num_heads": 4,
                 "num_classes": 10, "patch_size": 2, "input_size": 8}  # fmt: skip
    with pytest.raises(CheckpointError, match="--model: describes another network than SOURCE holds"):
        model = MODEL_JSON | {"predictor": predictor | change}
        convert(GOLDEN / "sit_tiny_p2.pt", tmp_path / "a.ckpt", description=model)
    assert not (tmp_path / "a.ckpt").exists()
    convert(GOLDEN / "sit_tiny_p2.pt", tmp_path / "a.ckpt", description=MODEL_JSON | {"predictor": predictor})
