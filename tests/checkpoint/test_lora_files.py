"""Adapters in the files of other programs: exact round trips, the traps, and the real diffusers and peft as peers."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mindspeed_mm_dit.checkpoint.lora import ADAPTER_FORMATS, Adapter, LowRank, parse, read_adapters
from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.configs.dit import DiTConfig
from mindspeed_mm_dit.configs.joint import Flux2Config, FluxConfig, QwenImageConfig, SD3Config, ZImageConfig
from mindspeed_mm_dit.configs.tuning import Tuning
from mindspeed_mm_dit.configs.video_transformer import WanConfig
from mindspeed_mm_dit.errors import CheckpointError, ConfigError
from mindspeed_mm_dit.framework.safetensors_file import read_safetensors_file
from mindspeed_mm_dit.framework.torch_file import read_torch_file
from mindspeed_mm_dit.integrations.formats import diffusers_folder, lora_files
from mindspeed_mm_dit.integrations.formats.diffusers_folder import diffusers_frequencies
from mindspeed_mm_dit.integrations.formats.lora_names import joined, split_adapter
from mindspeed_mm_dit.integrations.formats.single_files import write_arrays
from mindspeed_mm_dit.models.init import initial_weights
from mindspeed_mm_dit.models.meta import parameters_of
from tests.conftest import GOLDEN

FOLDER = GOLDEN / "wan_lora_tiny"
WAN = WanConfig(num_layers=2, num_attention_heads=2, attention_head_dim=32, ffn_dim=96, in_channels=16, out_channels=16,
                text_dim=32, freq_dim=64, rope_max_seq_len=64, latent_size=(2, 4, 6))  # fmt: skip
DIT = DiTConfig(hidden_size=32, num_layers=2, num_heads=2, input_size=8, in_channels=4, num_classes=10)
HEADS = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16, "joint_attention_dim": 20}
TURNED = {"axes_dims_rope": (4, 6, 6)}
CONFIGS = {
    "wan": WAN, "dit": DIT,
    "flux": FluxConfig(**HEADS, **TURNED, num_single_layers=2, pooled_projection_dim=12),
    "flux2": Flux2Config(**HEADS, axes_dims_rope=(4, 4, 4, 4), num_single_layers=2),
    "sd3": SD3Config(**HEADS, pooled_projection_dim=12, dual_attention_layers=(0,)),
    "qwen_image": QwenImageConfig(**HEADS, **TURNED),
    "z_image": ZImageConfig(**HEADS, **TURNED, num_refiner_layers=1),
}  # fmt: skip
TARGETS = {
    "wan": ("to_q", "to_v", "ffn.net.2", "time_proj"),
    "dit": ("qkv", "attn.proj", "fc1", "blocks.{*}.adaLN_modulation.1"),
    "flux": ("to_q", "to_v", "add_k_proj", "ff.net.2", "proj_mlp", "norm_out.linear"),
    "flux2": ("to_q", "to_k", "to_qkv_mlp_proj", "ff_context.linear_in"),
    "sd3": ("to_k", "to_v", "add_q_proj", "norm1_context.linear", "ff.net.0.proj"),
    "qwen_image": ("to_q", "to_add_out", "txt_mod.1", "img_mlp.net.2"),
    "z_image": ("to_q", "attention.to_out.0", "w2"),
}


def drawn(config, targets, rank=3, alpha=5.0, seed=0):
    """Adapters none of whose values is zero; those of block 1 have another rank and strength."""
    draw, parameters = np.random.default_rng(seed), parameters_of(config)
    shapes, layers = parameters.shapes(), {}
    for layer in Tuning(targets).layers(parameters):
        rows, columns = shapes[f"{layer}.weight"]
        r, a = (rank + 2, alpha / 2) if "blocks.1." in layer else (rank, alpha)
        down, up = draw.standard_normal((r, columns)) / 8, draw.standard_normal((rows, r)) / 8
        layers[layer] = LowRank(down.astype(np.float32), up.astype(np.float32), a)
    return Adapter(layers)


def written(form, folder, adapter, shapes):
    known = ADAPTER_FORMATS[form]
    path = folder / (form if known.is_folder else f"{form}.safetensors")
    if known.is_folder:
        path.mkdir()
    return path, known.write(path, adapter, shapes)


def assert_same(found, wanted, exactly=True):
    assert found.layers.keys() == wanted.layers.keys()
    for layer, own in wanted.layers.items():
        other = found.layers[layer]
        if exactly:
            same = other.down.tobytes() == own.down.tobytes() and other.up.tobytes() == own.up.tobytes()
            assert same and other.alpha == pytest.approx(own.alpha, rel=1e-6), layer
        np.testing.assert_allclose(other.change(), own.change(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("model", CONFIGS)
@pytest.mark.parametrize("knows_the_base", [True, False], ids=["base", "no-base"])
def test_written_adapters_are_read_as_they_were(model, knows_the_base, tmp_path):
    adapter, shapes = drawn(CONFIGS[model], TARGETS[model]), parameters_of(CONFIGS[model]).shapes()
    layers = [name.removesuffix(".weight") for name in shapes if name.endswith(".weight")] if knows_the_base else None
    (tmp_path / "negative").mkdir()
    for form in ADAPTER_FORMATS:
        path, _ = written(form, tmp_path, adapter, shapes)
        found = lora_files.read(path, layers)
        assert_same(found, adapter, exactly=form != "native")  # (whose scale is in the numbers, to rounding)
        assert found.notes == (), form
        negative = drawn(CONFIGS[model], TARGETS[model], alpha=-5.0)
        path, _ = written(form, tmp_path / "negative", negative, shapes)
        assert_same(lora_files.read(path, layers), negative, exactly=False)  # takes away what the other adds


def test_q_k_and_v_apart_are_one_layer_here_and_apart_again():
    draw = np.random.default_rng(0)
    parts = [LowRank(*(draw.standard_normal(s, np.float32) for s in ((r, 6), (4, r))), 2.0 * r) for r in (2, 1, 3)]
    whole = joined(parts)
    assert (whole.rank, whole.scale) == (6, 2.0)
    for rows, part in zip(np.split(whole.change(), 3), parts):
        np.testing.assert_allclose(rows, part.change(), rtol=1e-6)
    for found, part in zip(split_adapter(whole, 3), parts):
        assert found.down.tobytes() == part.down.tobytes() and found.up.tobytes() == part.up.tobytes()
        assert found.alpha == part.alpha
    some = joined([parts[0], None, parts[2]])
    assert not some.change()[4:8].any() and split_adapter(some, 3)[1] is None
    other = joined([parts[0], parts[1]._replace(alpha=7.0), parts[2]])
    np.testing.assert_allclose(np.split(other.change(), 3)[1], 7.0 * parts[1].up @ parts[1].down, rtol=1e-5)
    dense = LowRank(parts[2].down, draw.standard_normal((12, 3)).astype(np.float32), 3.0)
    assert joined(split_adapter(dense, 3)).up.tobytes() == dense.up.tobytes()


@pytest.mark.parametrize(("source", "form", "file"), [
    ("wan_lora_ffn", "diffusers", "pytorch_lora_weights.safetensors"),
    ("kohya.safetensors", "kohya", ""),
    ("native.safetensors", "native", ""),
])  # fmt: skip
def test_files_of_other_programs_are_written_as_they_were(tmp_path, source, form, file):
    path, notes = written(form, tmp_path, lora_files.read(FOLDER / source), parameters_of(WAN).shapes())
    wanted, found = (read_safetensors_file(place / file)[0] for place in (FOLDER / source, path))
    assert found.keys() == wanted.keys() and notes == ()
    assert [name for name in wanted if not np.array_equal(found[name], wanted[name])] == []


DOWN_UP = ("lora_down.weight", "lora_up.weight")
WAN_Q = ["blocks.1.attn1.to_q"]


@pytest.mark.parametrize(("name", "suffixes", "wanted"), [
    ("blocks.1.self_attn.proj_q", ("lora_A.default.weight", "lora_B.default.weight"), WAN_Q),  # MindSpeed-MM
    ("blocks.1.self_attn.q", ("lora_A.default.weight", "lora_B.default.weight"), WAN_Q),  # DiffSynth
    ("diffusion_model.blocks.1.self_attn.q", DOWN_UP, WAN_Q),
    ("transformer.blocks.1.attn1.to_q", ("lora.down.weight", "lora.up.weight"), WAN_Q),
    ("lora_unet_blocks_1_self_attn_q", DOWN_UP, WAN_Q),
    ("base_model.model.blocks.1.attn1.to_q", ("lora_A.weight", "lora_B.weight"), WAN_Q),
    ("lora_transformer_blocks_1_attn1_to_q", ("lora_down", "lora_up"), WAN_Q),
    ("transformer.single_transformer_blocks.1.attn.to_q", DOWN_UP, ["single_transformer_blocks.1.attn.to_q"]),
    ("lora_transformer_transformer_blocks_1_attn_to_add_out", DOWN_UP, ["transformer_blocks.1.attn.to_add_out"]),
    ("lycoris_transformer_blocks_0_ff_context_net_2", DOWN_UP, ["transformer_blocks.0.ff_context.net.2"]),
    ("lora_unet_joint_blocks_0_x_block_attn2_qkv", DOWN_UP, [f"transformer_blocks.0.attn2.to_{x}" for x in "qkv"]),
    ("double_blocks.1.txt_attn.qkv", DOWN_UP, [f"transformer_blocks.1.attn.add_{x}_proj" for x in "qkv"]),
    ("diffusion_model.layers.1.attention.to_q", DOWN_UP, ["layers.1.attention.to_q"]),
    ("lora_unet_context_refiner_0_attention_out", DOWN_UP, ["context_refiner.0.attention.to_out.0"]),  # musubi-tuner
    ("lora_unet_transformer_blocks_1_img_mod_1", DOWN_UP, ["transformer_blocks.1.img_mod.1"]),
])  # fmt: skip
def test_names_of_other_programs_are_known_without_the_base(name, suffixes, wanted, tmp_path):
    matrices = (np.ones((2, 64), np.float32), np.ones((64 * len(wanted), 2), np.float32))
    arrays = {f"{name}.{suffix}": matrix for suffix, matrix in zip(suffixes, matrices)}
    write_arrays(tmp_path / "a.safetensors", arrays, {})
    found = lora_files.read(tmp_path / "a.safetensors").layers
    assert list(found) == wanted and {own.rank for own in found.values()} == {2}


@pytest.mark.parametrize("alphas", [0, 1, 2, 4])
def test_assumed_alphas_are_counted(alphas, tmp_path):
    ranks = {"blocks.0.attn1.to_q": 1, "blocks.0.attn1.to_v": 2, "blocks.1.attn1.to_q": 2, "blocks.1.attn2.to_k": 2}
    arrays = {f"transformer.{layer}.alpha": np.array(3.0, np.float32) for layer in [*ranks][:alphas]}
    for layer, rank in ranks.items():
        for half, shape in (("A", (rank, 8)), ("B", (8, rank))):
            arrays[f"transformer.{layer}.lora_{half}.weight"] = np.ones(shape, np.float32)
    write_arrays(tmp_path / "a.safetensors", arrays, {})
    found = lora_files.read(tmp_path / "a.safetensors", [*ranks])
    wanted = [3.0] * alphas + [float(rank) for rank in ranks.values()][alphas:]
    assert [found.layers[layer].alpha for layer in ranks] == wanted
    assert len(found.notes) == (alphas < 4)
    assert alphas in (0, 4) or f"{4 - alphas} of its 4" in found.notes[0]


TEXT_ENCODERS_IN = {
    "kohya": ["lora_te1_text_model_encoder_layers_0_self_attn_q_proj", "lora_te2_encoder_block_0_layer_0_q"],
    "diffusers": ["text_encoder.text_model.encoder.layers.0.self_attn.q_proj", "text_encoder_2.encoder.block.0.o"],
}  # fmt: skip


@pytest.mark.parametrize("program", TEXT_ENCODERS_IN)
def test_adapters_of_text_encoders_are_counted_and_not_applied(program, tmp_path):
    matrix = np.ones((4, 4), np.float32)
    names = [f"{layer}.{half}.weight" for layer in TEXT_ENCODERS_IN[program] for half in ("lora_A", "lora_B")]
    of_text = dict.fromkeys(names, matrix)
    network = {f"transformer.blocks.0.attn1.to_q.{half}.weight": matrix for half in ("lora_A", "lora_B")}
    settings = {"transformer.r": 4, "transformer.lora_alpha": 8, "text_encoder.r": 4, "text_encoder.use_dora": True}
    write_arrays(tmp_path / "a.safetensors", network | of_text, {lora_files.METADATA: json.dumps(settings)})
    found = lora_files.read(tmp_path / "a.safetensors", ["blocks.0.attn1.to_q"])
    assert [*found.layers] == ["blocks.0.attn1.to_q"] and found.layers["blocks.0.attn1.to_q"].alpha == 8
    assert len(found.notes) == 1 and "(2)" in found.notes[0]
    write_arrays(tmp_path / "b.safetensors", of_text, {})
    pytest.raises(CheckpointError, lora_files.read, tmp_path / "b.safetensors").match("text encoder")


@pytest.mark.parametrize(("name", "scale", "is_noted"), [
    ("wan_lora", 2, False), ("wan_lora_no_metadata", 1, True),
    ("native.safetensors", 1, False),  # (ss_network_alpha is 8: in A and B)
])  # fmt: skip
def test_a_strength_that_the_file_does_not_say_is_said(name, scale, is_noted):
    found = lora_files.read(FOLDER / name)
    assert found.layers["blocks.0.attn1.to_q"].scale == scale
    assert any("no alpha" in note for note in found.notes) == is_noted


def test_alpha_and_rank_of_single_layers_are_peft_s_patterns(tmp_path):
    file = shutil.copytree(FOLDER / "dit_lora", tmp_path / "peft") / "adapter_config.json"
    config = json.loads(file.read_text())
    for patterns, alphas in (
        ({"attn1.to_out.0": 2, "transformer_blocks.1.attn1.to_out.0": 4}, [2, 2]),
        ({r"^transformer_blocks\.1\..*": 4, "attn1.to_out.0": 2}, [2, 4]),
    ):
        file.write_text(json.dumps(config | {"alpha_pattern": patterns}))
        layers = lora_files.read(tmp_path / "peft").layers
        assert [layers[f"blocks.{i}.attn.proj"].alpha for i in (0, 1)] == alphas
    assert layers["blocks.0.attn.qkv"].scale == 2
    file.write_text(json.dumps(config | {"alpha_pattern": {"attn1.to_out.0": 2}, "use_rslora": True}))
    assert lora_files.read(tmp_path / "peft").layers["blocks.0.attn.proj"].scale == pytest.approx(2 / 4**0.5)


@pytest.mark.parametrize(("change", "words"), [
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights = 'pissa_niter_4'"),
    ({"init_lora_weights": "loftq"}, "init_lora_weights = 'loftq'"),
    ({"use_dora": True}, "use_dora = True"),
    ({"modules_to_save": ["proj_out"]}, r"modules_to_save = \['proj_out'\]"),
    ({"use_xora": 0.5}, "use_xora = 0.5"),  # of tomorrow
    ({"peft_type": "LOHA"}, "peft_type = 'LOHA'"),
    ({"layers_to_transform": [0]}, r"layers_to_transform = \[0\]"),
    ({"r": 3}, "r = 3.*attn1.to_k.* 4"),
    ({"rank_pattern": {"to_v": 8}}, "r = 8.*attn1.to_v.* 4"),
    ({"target_modules": ["to_q"]}, "target_modules.*attn1.to_k"),
    ({"exclude_modules": r".*to_k"}, "exclude_modules.*attn1.to_k"),
    ({"lora_alpha": "8"}, "lora_alpha = '8'"),
    ({"lora_alpha": 10**400}, "lora_alpha = about"),
    ({"alpha_pattern": {"to_k": [8]}}, r"alpha_pattern = \[8\]"),
    ({"alpha_pattern": {"to_k(": 8}}, r"alpha_pattern.*'to_k\('"),
    ({"alpha_pattern": {"(a|t|o|_)*!": 8}}, "alpha_pattern.*for ever"),
    ({"alpha_pattern": {".*.*.*.*!": 8}}, "alpha_pattern.*for ever"),
])  # fmt: skip
def test_peft_setting_of_another_meaning_is_refused(change, words, tmp_path):
    file = shutil.copytree(FOLDER / "dit_lora", tmp_path / "peft") / "adapter_config.json"
    config = json.loads(file.read_text())
    as_mindspeed_mm_writes = {"target_modules": ["transformer_blocks.{*}"]}
    without_effect = {"loftq_config": {"bits": 4}, "use_xora": None, "init_lora_weights": "gaussian"}
    file.write_text(json.dumps(config | as_mindspeed_mm_writes | without_effect))
    assert lora_files.read(tmp_path / "peft").layers
    file.write_text(json.dumps(config | change))
    pytest.raises(CheckpointError, lora_files.read, tmp_path / "peft").match(words)


@pytest.mark.parametrize("file", ["a.safetensors", "a.pt"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_alpha_of_two_bytes_is_read_from_either_file(file, dtype, tmp_path):
    kind, layer = getattr(torch, dtype), "lora_unet_blocks_0_self_attn_q"
    named = {"lora_down.weight": torch.ones(4, 64), "lora_up.weight": torch.ones(64, 4), "alpha": torch.tensor(2.0)}
    arrays = {f"{layer}.{name}": tensor.to(kind) for name, tensor in named.items()}
    (save_file if file.endswith("tensors") else torch.save)(arrays, tmp_path / file)
    assert main(["convert", str(tmp_path / file), str(tmp_path / "out"), "--to", "diffusers"]) == 0
    assert lora_files.read(tmp_path / "out").layers["blocks.0.attn1.to_q"].alpha == 2


def test_a_kohya_file_names_every_layer_that_diffusers_asks_for(tmp_path):
    adapter = drawn(WAN, ("to_q",))
    path, notes = written("kohya", tmp_path, adapter, parameters_of(WAN).shapes())
    arrays = read_safetensors_file(path)[0]
    assert len(arrays) == 3 * 2 * 10 and "16 layers" in notes[0]
    assert_same(lora_files.read(path), adapter)
    assert "diffusers" in ADAPTER_FORMATS["kohya"].write(tmp_path / "k.safetensors", adapter, {})[0]


@pytest.mark.parametrize(("name", "array", "words"), [
    ("blocks.0.attn1.to_q.lora_magnitude_vector", np.ones(64, np.float32), "is part of DoRA"),
    ("blocks.0.attn1.to_q.dora_scale", np.ones((64, 1), np.float32), "is part of DoRA"),
    ("blocks.0.attn1.to_q.lokr_w1", np.ones((4, 4), np.float32), "is part of LoKr"),
    ("blocks.0.attn1.to_q.hada_w1_a", np.ones((4, 4), np.float32), "is part of LoHa"),
    ("blocks.0.attn1.norm_q.diff", np.ones(64, np.float32), "is no part of a LoRA"),
    ("blocks.0.attn1.to_q.lora_A.weight", None, "lacks one of its two matrices"),
    ("blocks.0.attn1.to_q.lora_A.weight", np.ones((3, 64), np.float32), r"to_q.*\(64, 4\).*\(3, 64\)"),
    ("blocks.0.attn1.to_q.lora_A.weight", np.full((4, 64), np.nan, np.float32), "to_q.*not finite"),
    ("blocks.0.attn1.to_q.lora_B.weight", np.full((64, 4), -np.inf, np.float32), "to_q.*not finite"),
    ("blocks.0.attn1.to_q.lora_A.weight", np.ones((4, 64), bool), "to_q.*bool"),
    ("blocks.0.attn1.to_q.lora_A.weight", np.ones((4, 64), np.int64), "to_q.*int64"),
])  # fmt: skip
def test_what_is_no_lora_of_this_network_is_refused(name, array, words, tmp_path):
    arrays = read_safetensors_file(FOLDER / "wan_adapter/pytorch_lora_weights.safetensors")[0] | {name: array}
    write_arrays(tmp_path / "x.safetensors", {name: array for name, array in arrays.items() if array is not None}, {})
    pytest.raises(CheckpointError, lora_files.read, tmp_path / "x.safetensors").match(words)


def test_adapters_of_other_networks_or_several_are_refused(tmp_path):
    wide = WanConfig(num_layers=2, num_attention_heads=4, attention_head_dim=32, ffn_dim=96, text_dim=32)
    for config, words in ((wide, r"blocks.0.attn1.to_k.*\(64, 64\).*\(128, 128\)"), (DIT, "no linear layer")):
        with pytest.raises(CheckpointError, match=words):
            read_adapters([str(FOLDER / "wan_lora")], parameters_of(config).shapes(), "--lora")
    adapter = Adapter({"transformer_blocks.0.attn.to_q": LowRank(*(np.ones((2, 2), np.float32),) * 2, 2.0)})
    write = ADAPTER_FORMATS["native"].write
    pytest.raises(ConfigError, write, tmp_path / "c.safetensors", adapter, {}).match("--model.*several networks")


def test_merged_adapters_change_their_layers_alone_one_after_the_other(tmp_path):
    weights, adapter = initial_weights(parameters_of(WAN), 0), drawn(WAN, ("to_q",))
    none, once = adapter.merged(weights, 0.0), adapter.merged(weights)
    assert [name for name in weights if none[name].tobytes() != weights[name].tobytes()] == []
    changed = {name.removesuffix(".weight") for name in weights if not np.array_equal(once[name], weights[name])}
    assert changed == set(adapter.layers)
    (tmp_path / "a:2").write_text("")
    assert parse("a.safetensors:0.5", "--lora") == parse("a.safetensors:.5", "--lora")
    assert parse("a.safetensors:-1", "--lora")[1] == -1 and parse("c:/a", "--lora")[1] == 1
    assert parse(str(tmp_path / "a:2"), "--lora") == (tmp_path / "a:2", 1.0)
    wan = str(GOLDEN / "wan_tiny.pt")
    loras = ["--merge-lora", str(FOLDER / "wan_lora"), "--merge-lora", f"{FOLDER / 'kohya.safetensors'}:-0.5"]
    assert main(["convert", wan, str(tmp_path / "merged.safetensors"), *loras]) == 0
    merged, base = read_safetensors_file(tmp_path / "merged.safetensors")[0], read_torch_file(wan)["model"]
    name = "blocks.1.attn2.to_v"
    one, other = (lora_files.read(FOLDER / n).layers[name] for n in ("wan_lora", "kohya.safetensors"))
    wanted = base[f"{name}.weight"] + one.change() - 0.5 * other.change()
    np.testing.assert_allclose(merged[f"{name}.weight"], wanted, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def values():
    with np.load(FOLDER / "lora_values.npz") as file:
        return {name: file[name] for name in file if name.startswith(("wan/", "dit/"))}


@pytest.fixture
def peers():
    """diffusers with peft."""
    pytest.importorskip("peft", reason="requirements/dev.txt")
    return pytest.importorskip("diffusers", reason="requirements/video.txt")


def their_wan(diffusers):
    content = torch.load(GOLDEN / "wan_tiny.pt", weights_only=True)
    model = diffusers.WanTransformer3DModel(**content["config"])
    model.load_state_dict(content["model"])
    return model.eval()


def their_output(model, values, group, **inputs):
    with torch.no_grad():
        x, t = (torch.from_numpy(values[f"{group}/{name}"]) for name in "xt")
        given = {name: torch.from_numpy(values[f"{group}/{own}"]) for name, own in inputs.items()}
        return model(x, timestep=t, **given, return_dict=False)[0].numpy()


def our_wan_output(adapter, values):
    from mindspeed_mm_dit.framework import ops, runtime
    from mindspeed_mm_dit.models.layers import add_lora
    from mindspeed_mm_dit.models.video_transformer import Wan

    network = add_lora(Wan(WAN), adapter.specs())
    runtime.load_arrays(network, read_torch_file(GOLDEN / "wan_tiny.pt")["model"] | adapter.arrays())
    with ops.no_grad():
        return ops.numpy(network(*(ops.tensor(values[f"wan/{name}"]) for name in ("x", "t", "text"))))


def relative(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@pytest.mark.parametrize("form", ["diffusers", "kohya", "native", "peft"])
def test_diffusers_and_peft_load_what_is_written_here_for_wan(peers, values, form, tmp_path):
    adapter = drawn(WAN, ("to_q", "to_v", "ffn.net.2"))
    path, _ = written(form, tmp_path, adapter, parameters_of(WAN).shapes())
    model = their_wan(peers)
    if form == "peft":
        import peft

        model = peft.PeftModel.from_pretrained(model, str(path))
    else:
        state, metadata = peers.WanPipeline.lora_state_dict(str(path), return_lora_metadata=True)
        model.load_lora_adapter(state, prefix="transformer", metadata=metadata)
    theirs = their_output(model, values, "wan", encoder_hidden_states="text")
    assert relative(theirs, our_wan_output(adapter, values)) < 1e-5
    assert relative(theirs, our_wan_output(Adapter({}), values)) > 1e-3


def their_dit(diffusers, weights):
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=8, num_layers=2, sample_size=8,
        patch_size=2, num_embeds_ada_norm=10, norm_eps=1e-6, attention_bias=True,
    )  # fmt: skip
    arrays = diffusers_folder.to_diffusers(weights, DIT)
    model.load_state_dict({name: torch.tensor(array) for name, array in arrays.items()}, strict=False)
    return model.eval()


def our_dit_output(weights, values):
    from mindspeed_mm_dit.framework import nn, ops, runtime
    from mindspeed_mm_dit.models.dit import DiT

    network = DiT(DIT)
    runtime.load_arrays(network, weights)
    nn.set_constant(network.t_embedder, "frequencies", (128,), diffusers_frequencies)
    with ops.no_grad():
        return ops.numpy(network(*(ops.tensor(values[f"dit/{name}"]) for name in "xty")))


def test_peft_reads_our_adapters_of_a_dit_and_we_read_its(peers, values, tmp_path):
    import peft

    torch.manual_seed(0)
    draw = np.random.default_rng(3)
    weights = {  # none zero, so that the adapters show
        name: array if name == "pos_embed" else (0.2 * draw.standard_normal(array.shape)).astype(np.float32)
        for name, array in initial_weights(parameters_of(DIT), 0).items()
    }
    adapter = drawn(DIT, TARGETS["dit"])
    path, _ = written("peft", tmp_path, adapter, parameters_of(DIT).shapes())
    model = peft.PeftModel.from_pretrained(their_dit(peers, weights), str(path))
    theirs = their_output(model, values, "dit", class_labels="y")
    assert relative(our_dit_output(adapter.merged(weights), values), theirs) < 1e-5
    assert relative(our_dit_output(weights, values), theirs) > 1e-3
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["to_q", "to_v", "ff.net.2"], init_lora_weights=False)
    model = peft.get_peft_model(their_dit(peers, weights), config).eval()
    model.save_pretrained(str(tmp_path / "theirs"))
    found = lora_files.read(tmp_path / "theirs")
    assert set(found.layers) == {f"blocks.{i}.{layer}" for i in (0, 1) for layer in ("attn.qkv", "mlp.fc2")}
    theirs = their_output(model, values, "dit", class_labels="y")
    assert relative(our_dit_output(found.merged(weights), values), theirs) < 1e-5


@pytest.mark.parametrize(("arguments", "words"), [
    ("{lora} x.safetensors", "--to"),
    ("{lora} x.safetensors --to khoya", "'kohya'"),
    ("{lora} x.safetensors --to peft", "folder"),
    ("{lora} x --to native", ".safetensors"),
    ("{lora} x --to peft --merge-lora {lora}", "SOURCE holds adapters"),
    ("{wan} x.safetensors --merge-lora nothing.safetensors", "--merge-lora = nothing.safetensors does not exist"),
    ("{wan} x.safetensors --merge-lora {lora}:2000", ":2000' must have a strength"),
])  # fmt: skip
def test_impossible_conversions_are_refused(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given = arguments.format(lora=FOLDER / "wan_lora", wan=GOLDEN / "wan_tiny.pt").split()
    assert main(["convert", *given]) == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
