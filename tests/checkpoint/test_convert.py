"""Every format to every other and back, bit for bit; nothing is lost or replaced in silence."""

import dataclasses
import json
import subprocess
import sys
from itertools import permutations

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mindspeed_mm_dit import registry
from mindspeed_mm_dit.checkpoint import torch_dcp
from mindspeed_mm_dit.checkpoint.formats import FORMATS, format_of_source, read_weights
from mindspeed_mm_dit.checkpoint.state import State
from mindspeed_mm_dit.checkpoint.store import find_checkpoint, read_facts, relative_argument, without_folders
from mindspeed_mm_dit.configs.dit import DiTConfig
from mindspeed_mm_dit.errors import CheckpointError, ConfigError, PlatformError
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.framework.mindspore_file import read_mindspore_file
from mindspeed_mm_dit.framework.torch_file import read_torch_file, write_torch_file
from mindspeed_mm_dit.integrations.formats.config_json import infer_vae_config, vae_shapes
from mindspeed_mm_dit.integrations.formats.convert import convert
from mindspeed_mm_dit.integrations.formats.convert import write as write_for_others
from mindspeed_mm_dit.integrations.formats.diffusers_folder import diffusers_shapes, from_diffusers, to_diffusers
from mindspeed_mm_dit.models.dit import DiT
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.models.weight_adapters import weight_converter_of
from tests import checkpoint_fixtures as fixtures
from tests.checkpoint_fixtures import FACTS, MODEL_JSON, TINY, assert_same, dit_arrays, training_state, write
from tests.conftest import GOLDEN


def vae_arrays():
    return fixtures.random_arrays(vae_shapes(fixtures.TINY_VAE), 0)


def target_in(folder, name):
    return folder / fixtures.FILE_NAMES.get(name, name)


def read(path):
    path = find_checkpoint(path)
    return FORMATS[format_of_source(path)].read(path)


OWNERS = ("predictor.{name}", "{name}")
RING = ("safetensors", "pytorch", "diffusers", "pt", "mindspore", "original", "ckpt")
PAIRS = [pytest.param(*pair, marks=[] if pair in zip(RING, RING[1:] + RING[:1]) else pytest.mark.extended)
         for pair in permutations(RING, 2)]  # fmt: skip
"""Of the pairs, each format is converted from once, and to once; the others are a further combination."""


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_weights_survive_every_format_and_back(tmp_path, first, second):
    weights = dit_arrays()
    trees = {"model": weights, "ema": weights} if first in ("pytorch", "mindspore") else {"model": weights}
    source = write(tmp_path, first, State(trees, FACTS))
    target, back = target_in(tmp_path / "there", second), target_in(tmp_path / "back", first)
    convert(source, target, second, description=MODEL_JSON)
    convert(target, back, first, description=MODEL_JSON)
    assert_same(read(target).weights, weights)
    assert_same(read(back).weights, weights)
    if first not in ("pytorch", "mindspore", "pt", "ckpt"):
        for file in [source] if source.is_file() else source.iterdir():
            again = back if back.is_file() else back / file.name
            assert file.suffix == ".safetensors" or again.read_bytes() == file.read_bytes()


def test_autoencoder_survives_every_format(tmp_path):
    weights = vae_arrays()
    widths = {"norm_num_groups": 4, "block_out_channels": [8, 16]}
    config = {"_class_name": "AutoencoderKL", "scaling_factor": 0.5, **widths}
    source = write(tmp_path, "pt", State({"model": weights}, config=config))
    for number, kind in enumerate(("diffusers", "safetensors", "ckpt", "diffusers", "pt", "safetensors", "diffusers")):
        target = target_in(tmp_path / str(number), kind)
        convert(source, target, kind, description=config)
        assert_same(read(target).weights, weights)
        if kind == "diffusers":
            assert json.loads((target / "config.json").read_text()) == config
        source = target


@pytest.mark.parametrize(("source", "target", "options", "error", "words"), [
    ("vae.pt", "b", {"to": "diffusers"}, ConfigError, "--model.* 32 .* 8, 16"),
    ("vae.pt", "b", {"to": "diffusers", "description": {"norm_num_groups": 4}}, ConfigError, "--model.* neither"),
    ("dit.pt", "b", {"to": "diffusers"}, ConfigError, "--model.* is needed"),  # (for the number of heads)
    ("dit.pt", "b", {"to": "peft"}, ConfigError, "--to = peft"),
    ("dit.pt", "b", {}, ConfigError, "--to "),
    ("dit.pt", "a.pt", {"to": "ckpt"}, ConfigError, r"\.ckpt"),
    ("dit.pt", "a.pt", {"to": "mindspore"}, ConfigError, "folder"),
    ("dit.pt", "a", {"to": "onnx"}, ConfigError, "onnx"),
    ("a.onnx", "b.pt", {}, CheckpointError, r"a\.onnx is in none of the formats"),
    ("none", "b.pt", {}, CheckpointError, "none does not exist"),
    ("w.pt", "b.ckpt", {}, CheckpointError, r"known predictor.* w\b"),
])  # fmt: skip
def test_unclear_source_or_target_is_refused(tmp_path, source, target, options, error, words):
    write_torch_file(tmp_path / "vae.pt", vae_arrays())
    write_torch_file(tmp_path / "dit.pt", dit_arrays())
    write_torch_file(tmp_path / "w.pt", {"w": np.zeros(2, np.float32)})
    (tmp_path / "a.onnx").write_text("x")
    pytest.raises(error, convert, tmp_path / source, tmp_path / target, **options).match(words)
    assert not (tmp_path / target).exists()


@pytest.mark.parametrize("pair", ["pytorch mindspore", "mindspore pytorch", "mindspore ckpt"])
def test_a_run_keeps_optimizer_average_and_facts(tmp_path, pair):
    state, (first, second) = training_state(), pair.split()
    source = write(tmp_path, first, state)
    target, back = target_in(tmp_path / "there", second), tmp_path / "back"
    convert(source, target, second)
    convert(target, back, first)
    for place in (target, back):
        for tree in ("model", "ema", "optimizer"):
            assert_same(read(place).trees[tree], state.trees[tree])
    if second != "ckpt":
        for root in (target, back):
            assert (root / "latest_checkpointed_iteration.txt").read_text() == "7"
            assert read_facts(root / "iter_0000007") == FACTS


@pytest.mark.parametrize("owner", ["{number}", *(pytest.param(own, marks=pytest.mark.extended) for own in OWNERS)])
def test_run_of_mindspeed_mm_is_converted_with_its_moments(tmp_path, owner):
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
    return {name: torch_dcp.as_tensor(array) for name, array in arrays.items()}


def test_both_sets_of_weights_stay_in_a_pt_and_facts_are_its_args(tmp_path):
    state = training_state()
    assert convert(write(tmp_path, "mindspore", state), tmp_path / "a.pt").notes == ("left out: optimizer",)
    content = read_torch_file(tmp_path / "a.pt")
    assert list(content) == ["model", "ema", "args"] and content["args"] == FACTS
    assert_same(content["ema"], state.trees["ema"])
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
    for tree in ("model", "ema"):
        assert_same(read(tmp_path / "run").trees[tree], published[tree])
    convert(tmp_path / "run", tmp_path / "a.ckpt", weights="model")
    for found in (read_mindspore_file(tmp_path / "a.ckpt"), read_weights(tmp_path / "a.ckpt")):
        assert_same(found, published["model"])


def one_block_more(arrays):
    return {name: arrays[name] + 1 for name in arrays if "blocks.1.norm1.emb.class" in name}


@pytest.mark.parametrize(("form", "gone", "changed", "message"), [
    ("pt", "blocks.1.mlp.fc1.bias", {}, r"blocks\.1\.mlp\.fc1\.bias is missing"),
    ("pt", None, {"extra": np.zeros(2)}, "extra is not in this model"),
    ("pt", None, {"blocks.0.attn.qkv.bias": np.zeros(2)}, r"qkv\.bias is \(2,\), .*\(48,\)"),
    ("pt", "pos_embed", {}, "no weight pos_embed"),
    ("diffusers", "proj_out_1.bias", {}, r"proj_out_1\.bias is missing"),
    ("diffusers", None, {"proj_out_2.bias": np.zeros(2)}, r"proj_out_2\.bias is \(2,\)"),
    ("diffusers", None, {"extra": np.zeros(2)}, "extra is not in this model"),
    ("diffusers", None, one_block_more, "differs from block"),
])  # fmt: skip
def test_missing_unknown_and_misshapen_tensors_are_refused(tmp_path, form, gone, changed, message):
    source = write(tmp_path, form, State({"model": dit_arrays()}, FACTS))
    file = source / "diffusion_pytorch_model.safetensors"
    arrays = dit_arrays() if form == "pt" else load_file(file)
    arrays.pop(gone, None)
    arrays |= changed(arrays) if callable(changed) else changed
    write_torch_file(source, arrays) if form == "pt" else save_file(arrays, file)
    pytest.raises(CheckpointError, convert, source, tmp_path / "b.ckpt").match(message)
    assert not (tmp_path / "b.ckpt").exists()


def test_only_variant_of_a_folder_is_read(tmp_path):
    folder = write(tmp_path, "diffusers", State({"model": dit_arrays()}, FACTS))
    weights, file = read(folder).weights, folder / "diffusion_pytorch_model.safetensors"
    half, other = file.with_suffix(".fp16.safetensors"), file.with_suffix(".bf16.safetensors")
    file.rename(half)
    assert_same(read(folder).weights, weights)
    other.write_bytes(half.read_bytes())
    pytest.raises(CheckpointError, read, folder).match(f"{other.name} and {half.name}")
    half.unlink()
    other.rename(file.with_suffix(".gguf"))
    pytest.raises(CheckpointError, read, folder).match(r"config\.json, diffusion_pytorch_model\.gguf")


def test_an_autoencoders_and_an_optimizers_tensors_are_checked_too(tmp_path):
    vae = vae_arrays()
    vae["decoder.up_blocks.1.resnets.2.conv1.bias"] = np.zeros(3, np.float32)
    write_torch_file(tmp_path / "a.pt", vae)
    refused = pytest.raises(CheckpointError, convert, tmp_path / "a.pt", tmp_path / "b.ckpt")
    refused.match(r"up_blocks\.1\.resnets\.2\.conv1\.bias is \(3,\)")
    state = training_state()
    del state.trees["optimizer"]["state.blocks.0.mlp.fc1.bias.step"]
    with pytest.raises(CheckpointError, match=r"'optimizer'.*fc1\.bias\.step is missing"):
        convert(write(tmp_path, "mindspore", state), tmp_path / "b.ckpt")


def test_nothing_is_replaced_unless_asked(tmp_path):
    write_torch_file(tmp_path / "a.pt", dit_arrays())
    (tmp_path / "b.ckpt").write_text("mine")
    pytest.raises(CheckpointError, convert, tmp_path / "a.pt", tmp_path / "b.ckpt").match("exists")
    assert (tmp_path / "b.ckpt").read_text() == "mine"
    convert(tmp_path / "a.pt", tmp_path / "b.ckpt", overwrite=True)
    convert(tmp_path / "a.pt", tmp_path / "run", "mindspore")
    convert(tmp_path / "a.pt", tmp_path / "run", "mindspore", overwrite=True)
    (tmp_path / "link").symlink_to("run")
    for _ in range(2):  # (the first takes the place of the link and leaves what it leads to)
        convert(tmp_path / "a.pt", tmp_path / "link", "mindspore", overwrite=True)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "me.jpg").write_text("mine")
    with pytest.raises(CheckpointError, match="photos is a folder, but not a checkpoint"):
        convert(tmp_path / "a.pt", tmp_path / "photos", "mindspore", overwrite=True)
    for name in ("a.pt", "run"):
        to = "mindspore" if name == "run" else None
        pytest.raises(CheckpointError, convert, tmp_path / name, tmp_path / name, to, overwrite=True).match("SOURCE")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.pt", "b.ckpt", "link", "photos", "run"]


def test_a_failed_write_leaves_the_old_target_and_no_rest(tmp_path, monkeypatch):
    write_torch_file(tmp_path / "a.pt", dit_arrays())
    convert(tmp_path / "a.pt", tmp_path / "run", "mindspore")

    def full(path, state):
        (path / "half").write_text("half")
        raise OSError("No space left on device")

    monkeypatch.setitem(registry._RECORDS["checkpoint_format"], "mindspore", FORMATS["mindspore"]._replace(write=full))
    failed = pytest.raises(CheckpointError, convert, tmp_path / "a.pt", tmp_path / "run", "mindspore", overwrite=True)
    failed.match("No space left on device")
    assert_same(read(tmp_path / "run").weights, dit_arrays())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.pt", "run"]


def test_without_pytorch_only_its_folders_are_refused(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.endswith("checkpoint.torch_dcp")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("mindspeed_mm_dit.checkpoint.torch_dcp", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    write_torch_file(tmp_path / "a.pt", dit_arrays())
    pytest.raises(PlatformError, convert, tmp_path / "a.pt", tmp_path / "run", "pytorch").match("(?i)pip install torch")
    convert(tmp_path / "a.pt", tmp_path / "run", "mindspore")
    folder = tmp_path / "theirs" / "iter_0000007"
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(b"")
    for use in (lambda: read_weights(folder), lambda: convert(folder, tmp_path / "b.pt")):
        pytest.raises(PlatformError, use).match(r"(?s)theirs/iter_0000007.*mm-dit convert")


def test_no_framework_is_imported_for_plain_files(tmp_path):
    write_torch_file(tmp_path / "a.pt", dit_arrays())
    code = (
        "import sys; sys.modules['torch'] = sys.modules['mindspore'] = None\n"
        "from mindspeed_mm_dit.cli.main import main\n"
        f"sys.exit(main(['convert', {str(tmp_path / 'a.pt')!r}, {str(tmp_path / 'run')!r}, '--to', 'mindspore']))"
    )
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr
    assert_same(read(tmp_path / "run").weights, dit_arrays())


@pytest.mark.parametrize("change", [{"hidden_size": 96}, {"num_layers": 2}, {"num_classes": 11}, {"patch_size": 4}])
def test_weights_are_not_kept_with_the_description_of_another_network(tmp_path, change):
    predictor = {"model_id": "dit", "in_channels": 4, "hidden_size": 64, "num_layers": 3, "num_heads": 4,
                 "num_classes": 10, "patch_size": 2, "input_size": 8}  # fmt: skip
    model = MODEL_JSON | {"predictor": predictor | change}
    with pytest.raises(CheckpointError, match=r"--model.*another network than SOURCE"):
        convert(GOLDEN / "sit_tiny_p2.pt", tmp_path / "a.ckpt", description=model)
    assert not (tmp_path / "a.ckpt").exists()
    convert(GOLDEN / "sit_tiny_p2.pt", tmp_path / "a.ckpt", description=MODEL_JSON | {"predictor": predictor})


def test_rules_use_every_tensor_once_and_shapes_tell_the_architecture():
    arrays = dit_arrays()
    theirs = to_diffusers(arrays, TINY)
    assert {name: array.shape for name, array in theirs.items()} == diffusers_shapes(TINY)
    assert_same(from_diffusers(theirs, TINY, "x"), arrays)
    assert_same(to_diffusers(from_diffusers(theirs, TINY, "x"), TINY), theirs)
    assert (
        dataclasses.replace(weight_converter_of(DiTConfig).of_shapes(parameters_of(TINY).shapes()), num_heads=2) == TINY
    )
    assert infer_vae_config(vae_shapes(fixtures.TINY_VAE), norm_num_groups=4) == fixtures.TINY_VAE
    published = read_torch_file(GOLDEN / "dit_tiny_p2.pt")["model"]
    shapes = {name: array.shape for name, array in published.items()}
    assert parameters_of(weight_converter_of(DiTConfig).of_shapes(shapes)).shapes() == shapes


@fixtures.needs_diffusers
def test_names_and_shapes_are_those_of_diffusers():
    AutoencoderKL = pytest.importorskip("diffusers").AutoencoderKL
    theirs = {name: tuple(t.shape) for name, t in fixtures.diffusers_dit().state_dict().items()}
    assert diffusers_shapes(TINY) == theirs
    vae = AutoencoderKL(
        block_out_channels=(8, 16), down_block_types=("DownEncoderBlock2D",) * 2, layers_per_block=2,
        up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=4,
    )  # fmt: skip
    assert vae_shapes(fixtures.TINY_VAE) == {name: tuple(t.shape) for name, t in vae.state_dict().items()}


@fixtures.needs_diffusers
@pytest.mark.pytorch
@pytest.mark.parametrize("direction", ["to diffusers", "from diffusers"])
def test_outputs_equal_those_of_diffusers(tmp_path, framework, direction):
    import torch
    from diffusers import DiTTransformer2DModel

    torch.manual_seed(0)
    if direction == "to diffusers":
        write_torch_file(tmp_path / "a.pt", dit_arrays())
        model_json = {**MODEL_JSON, "ae": {"model_id": "autoencoder_kl", "from_pretrained": "none"}}
        model_json["predictor"] = MODEL_JSON["predictor"] | {"in_channels": 4}
        convert(tmp_path / "a.pt", tmp_path / "d", "diffusers", description=model_json)
        theirs, weights = DiTTransformer2DModel.from_pretrained(tmp_path / "d").eval(), dit_arrays()
    else:
        theirs = fixtures.diffusers_dit()
        shared = theirs.transformer_blocks[0].norm1.emb.state_dict()
        for block in theirs.transformer_blocks:  # the published network has one embedding for all blocks
            block.norm1.emb.load_state_dict(shared)
        theirs.save_pretrained(tmp_path / "pipeline" / "transformer")
        convert(tmp_path / "pipeline", tmp_path / "a.safetensors")
        weights = read_weights(tmp_path / "a.safetensors")
    ours = DiT(TINY).eval()
    runtime.load_arrays(ours, weights)
    for module in theirs.modules():  # diffusers spaces the 128 frequencies by 1/127, the published model by 1/128
        if hasattr(module, "downscale_freq_shift"):
            module.downscale_freq_shift = 0
    x, t, y = torch.randn(3, 4, 8, 8), torch.tensor([0, 10, 999]), torch.tensor([0, 3, 5])
    with torch.no_grad():
        a, b = ours(x, t, y), theirs(x, timestep=t, class_labels=y).sample
    assert (a - b).norm() / b.norm() < 1e-5  # float32: cosines of up to 999 rad from frequencies rounded otherwise


PRIVATE_FACTS = {
    "iteration": 3, "model": {"ae": {"from_pretrained": "/home/alice/vae"}, "predictor": {"model_id": "dit"}},
    "command": {"arguments": ["--mm-data", "/home/alice/d.json", "--save=/home/alice/ck"], "folder": "/home/alice"},
    "settings": {}, "classes": ["a/b", "cat"],
}  # fmt: skip


def test_absolute_paths_are_cut_to_their_names_and_nothing_else_is():
    assert without_folders(PRIVATE_FACTS) == {
        **PRIVATE_FACTS, "model": {"ae": {"from_pretrained": "vae"}, "predictor": {"model_id": "dit"}},
        "command": {"arguments": ["--mm-data", "d.json", "--save=ck"], "folder": "."},
    }  # fmt: skip
    assert without_folders({"what": "--reference = /home/alice/ref.npz"}) == {"what": "--reference = ref.npz"}
    assert relative_argument("--save=/a/b/c", "/a") == "--save=b/c" and relative_argument("/a/b", "/a") == "b"
    assert relative_argument("/ab/c", "/a") == "/ab/c" and relative_argument("b/c", "/a") == "b/c"


@pytest.mark.parametrize("kind", ["pt", "safetensors", "pytorch"])
def test_what_is_written_for_others_says_nothing_of_where_it_was_made(tmp_path, kind):
    weights = {"w": np.ones(3, np.float32)}
    trees = {"model": weights} if kind == "safetensors" else {"model": weights, "ema": weights}
    endings = FORMATS[kind].endings
    write_for_others(tmp_path / f"out{endings[0] if endings else ''}", kind, State(trees, PRIVATE_FACTS))
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"alice" not in written and (b"from_pretrained" in written) and json.dumps("vae").encode()[1:-1] in written
