"""Weights of FLUX, SD3, Qwen-Image, Z-Image and Wan: diffusers' folders and single files under their authors' names."""

import json
import re

import diffusers
import numpy as np
import pytest
import torch
from diffusers.loaders import single_file_utils
from safetensors.torch import load_file, save_file

from mindspeed_mm_dit.checkpoint.adapting import adapt_weights, read_source
from mindspeed_mm_dit.checkpoint.state import State
from mindspeed_mm_dit.checkpoint.targets import check_state
from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.configs.files import read_safetensors_header
from mindspeed_mm_dit.configs.video_transformer import WanConfig
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.framework.safetensors_file import read_safetensors_file
from mindspeed_mm_dit.framework.torch_file import write_torch_file
from mindspeed_mm_dit.integrations.formats import diffusers_folder, families, single_files
from mindspeed_mm_dit.integrations.formats.config_json import wan_model_of
from mindspeed_mm_dit.integrations.formats.families import from_original, to_original_names
from mindspeed_mm_dit.integrations.formats.quantized import read_quantized
from mindspeed_mm_dit.integrations.formats.single_files import plain, read_safetensors, recognised
from mindspeed_mm_dit.models.video_transformer import Wan
from tests.checkpoint_fixtures import assert_same
from tests.conftest import GOLDEN

FAMILIES = {
    "flux_tiny": "double_blocks.1.txt_attn.qkv.bias", "flux_schnell_tiny": "single_blocks.1.linear1.weight",
    "flux2_tiny": "double_blocks.1.img_mlp.2.weight", "sd3_tiny": "joint_blocks.1.x_block.attn.qkv.weight",
    "sd35_tiny": "joint_blocks.0.context_block.attn.ln_q.weight", "zimage_tiny": "layers.1.attention.qkv.weight",
    "qwenimage_tiny": "transformer_blocks.0.img_mod.1.bias", "wan22_ti2v_tiny": "blocks.0.self_attn.q.weight",
    "wan21_i2v_tiny": "blocks.1.cross_attn.k_img.weight",
}  # fmt: skip
"""Folder -> a tensor in a file of the authors."""
FAMILY_OF = {name: families.FAMILIES[name] for name in ("flux", "flux2", "sd3")} | {
    "zimage": families.FAMILIES["z_image"], "wan22": families.FAMILIES["wan"],
}  # fmt: skip


def weights_of(path):
    return diffusers_folder.read_arrays(path) if path.is_dir() else single_files.read_safetensors(path).weights


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def kinds_in(path):
    """The dtypes in a file, or in all files of a folder, by the names of tensors."""
    files = path.glob("*.safetensors") if path.is_dir() else [path]
    return {name: own["dtype"] for file in files for name, own in read_safetensors_header(file).tensors.items()}


@pytest.mark.parametrize("name", ["flux_tiny", "flux2_tiny", "sd3_tiny", "zimage_tiny", "wan22_t2v_tiny/transformer"])
def test_missing_or_scalar_first_layer_is_named(name):
    weights = diffusers_folder.read_arrays(GOLDEN / name)
    theirs = to_original_names(weights, FAMILY_OF[name.partition("_")[0]])
    layer = next(layer for layer in theirs if re.search(r"\.0\..*(qkv|self_attn\.q)\.weight", layer))
    check_state(recognised(State({"model": plain(theirs)})), "a file")
    with pytest.raises(CheckpointError, match=r"\.0\..*weight is \(\)"):
        check_state(recognised(State({"model": plain(theirs | {layer: np.zeros((), np.float32)})})), "a file")
    with pytest.raises(CheckpointError, match=re.escape(layer.replace("self_attn.q", "attn1.to_q"))):
        check_state(recognised(State({"model": plain({n: theirs[n] for n in theirs if n != layer})})), "a file")


def convert(*arguments):
    assert main(["convert", *map(str, arguments)]) == 0


@pytest.mark.parametrize(("name", "tensor"), FAMILIES.items())
def test_folder_of_diffusers_becomes_any_file_and_a_folder_again(name, tensor, tmp_path, monkeypatch):
    theirs = weights_of(GOLDEN / name)
    source = GOLDEN / name
    for target, *form in (["a.safetensors"], ["b.safetensors", "--to", "original"], ["c.safetensors"]):
        convert(source, tmp_path / target, *form)
        source = tmp_path / target
        assert_same(weights_of(source), theirs)
    assert tensor in kinds_in(tmp_path / "b.safetensors")
    convert(source, tmp_path / "folder", "--to", "diffusers")
    assert_same(weights_of(tmp_path / "folder"), theirs)
    kinds = kinds_in(GOLDEN / name)  # (bfloat16)
    assert kinds_in(tmp_path / "folder") == kinds_in(tmp_path / "a.safetensors") == kinds
    assert config_of(tmp_path / "folder") == config_of(GOLDEN / name)
    monkeypatch.setattr(diffusers_folder, "MAX_FILE_BYTES", 30_000)
    convert(source, tmp_path / "parts", "--to", "diffusers")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 2
    assert_same(weights_of(tmp_path / "parts"), theirs)


@pytest.mark.parametrize(("name", "key", "expected"), [
    ("flux_schnell_tiny", "axes_dims_rope", [2, 4, 6]), ("sd3_tiny", "num_attention_heads", 1),
    ("wan21_i2v_tiny", "attention_head_dim", 28),
])  # fmt: skip
def test_settings_that_no_tensor_shows_are_assumed_and_named(name, key, expected, tmp_path, capsys):
    single_files.write_arrays(tmp_path / "a.safetensors", weights_of(GOLDEN / name), {})
    convert(tmp_path / "a.safetensors", tmp_path / "folder", "--to", "diffusers")
    assert re.search(f"assumed, as .*{key} = {re.escape(str(expected))}", capsys.readouterr().out)
    assert config_of(tmp_path / "folder")[key] == expected != config_of(GOLDEN / name)[key]


@pytest.mark.parametrize(("name", "key", "value"), [
    ("flux_tiny", "out_channels", 32), ("sd3_tiny", "patch_size", 1), ("sd3_tiny", "out_channels", 8),
    ("qwenimage_tiny", "out_channels", 9), ("zimage_tiny", "n_kv_heads", 7),
])  # fmt: skip
def test_a_value_that_is_not_supported_is_called_so(name, key, value, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_of(GOLDEN / name) | {key: value}))
    (tmp_path / "diffusion_pytorch_model.safetensors").symlink_to(*(GOLDEN / name).glob("*.safetensors"))
    pytest.raises(CheckpointError, diffusers_folder.read, tmp_path).match(f"{key} = {value}")


@pytest.mark.parametrize("name", ["flux_tiny", "flux_schnell_tiny", "sd3_tiny", "sd35_tiny"])
def test_diffusers_reads_the_same_from_a_file_of_the_authors(name, tmp_path, monkeypatch):
    split = torch.split  # (it has FLUX's widths written in)
    monkeypatch.setattr(torch, "split", lambda x, sizes, dim: split(x, [s * len(x) // sum(sizes) for s in sizes], dim))
    convert(GOLDEN / name, tmp_path / "a.safetensors", "--to", "original")
    arrays = read_safetensors_file(tmp_path / "a.safetensors")[0]
    kind = "flux" if "flux" in name else "sd3"
    read = getattr(single_file_utils, f"convert_{kind}_transformer_checkpoint_to_diffusers")
    found = read({n: torch.from_numpy(array.copy()) for n, array in arrays.items()})
    assert_same({n: tensor.numpy() for n, tensor in found.items()}, weights_of(GOLDEN / name))


def in_float8(weights, form):
    """The weights in float8 as programs store them, and the numbers that they stand for."""
    stored, meant = {}, {}
    for name, array in weights.items():
        tensor, scale, stem = torch.from_numpy(array.copy()), torch.ones(()), name.removesuffix(".weight")
        if array.ndim > 1 and form != "cast":
            scale = (tensor.abs().amax(1, keepdim=True) if form == "rows" else tensor.abs().max()) / 448
        low = (tensor / scale).to(torch.float8_e4m3fn)
        stored[name], meant[name] = low, (low.float() * scale).numpy()
        if array.ndim > 1 and form == "comfyui":
            stored |= {f"{stem}.scale_weight": scale, f"{stem}.scale_input": torch.ones(())}
        elif array.ndim > 1 and form == "blocks":
            stored[f"{stem}.weight_scale_inv"] = scale.expand(*(-(-side // 128) for side in array.shape)).clone()
        elif array.ndim > 1 and form == "rows":
            stored[f"{stem}.weight_scale"] = scale
    return (stored | {"scaled_fp8": torch.ones(2).to(torch.float8_e4m3fn)} if form == "comfyui" else stored), meant


@pytest.mark.parametrize("form", ["cast", "comfyui", "rows", "blocks"])
def test_weights_in_float8_are_multiplied_by_their_scales(form, tmp_path, capsys):
    stored, meant = in_float8(weights_of(GOLDEN / "flux_tiny"), form)
    source = path = tmp_path / "low.safetensors"
    if form == "rows":  # in a folder of diffusers
        (source := tmp_path / "low").mkdir()
        (tmp_path / "low/config.json").write_bytes((GOLDEN / "flux_tiny/config.json").read_bytes())
        path = source / "diffusion_pytorch_model.safetensors"
    save_file(stored, path)
    convert(source, tmp_path / "wide.safetensors")
    assert_same(weights_of(tmp_path / "wide.safetensors"), meant)
    assert "tensors are stored in float8" in capsys.readouterr().out
    if form != "cast":
        scales = [name for name in stored if "scale" in name and "input" not in name]
        for missing in (scales[-2:-1], scales, [*scales, *(name for name in stored if "_input" in name)]):
            save_file({name: tensor for name, tensor in stored.items() if name not in missing}, path)
            pytest.raises(CheckpointError, single_files.read_stored, [path], path).match("float8.*scale")


def test_scales_by_block_may_be_as_many_as_rows():
    scale = np.arange(1, 129, dtype=np.float32).reshape(1, 128)
    stored = {"a.weight": np.full((128, 128 * 128), 0x38, np.uint8), "a.weight_scale_inv": scale}  # (ones)
    found, _ = read_quantized(stored, {"a.weight": "F8_E4M3"}, {}, "low.safetensors")
    np.testing.assert_array_equal(found["a.weight"], np.broadcast_to(scale.repeat(128, 1), (128, 128 * 128)))


def mark(format_name, **settings):
    return torch.tensor(list(json.dumps({"format": format_name, **settings}).encode()), dtype=torch.uint8)


def comfy_mixed():
    return load_file(GOLDEN / "quant_dit_tiny/comfy_mixed.safetensors")


@pytest.mark.parametrize("form", ["marks", "header", "whole checkpoint", "float8 as bytes"])
def test_float8_and_int8_equal_the_numbers_of_comfy_kitchen(form, tmp_path):
    stored, metadata, prefix = comfy_mixed(), {}, ""
    layers = {name[:-12]: json.loads(bytes(tensor.tolist())) for name, tensor in stored.items() if "comfy" in name}
    if form != "marks":
        metadata["_quantization_metadata"] = json.dumps({"format_version": "1.0", "layers": layers})
        stored = {name: tensor for name, tensor in stored.items() if "comfy_quant" not in name}
    if form == "whole checkpoint":
        prefix = "model.diffusion_model."
        stored = {f"{prefix}{name}": tensor for name, tensor in stored.items()}
        stored |= {"text_encoders.a.comfy_quant": mark("nvfp4"), "text_encoders.a.weight": mark("x")}
    if form == "float8 as bytes":
        stored = {name: t.view(mark("x").dtype) if "float8" in str(t.dtype) else t for name, t in stored.items()}
    save_file(stored, tmp_path / "a.safetensors", metadata)
    weights, _, _, notes = single_files.read_stored([tmp_path / "a.safetensors"], tmp_path)
    assert "4 tensors are stored in float8 and 6 tensors are stored in int8" in notes[0]
    with np.load(GOLDEN / "quant_dit_tiny/comfy_mixed.npz") as truth:
        assert (len(truth), len(weights)) == (10, 32)
        for name, right in truth.items():
            np.testing.assert_array_equal(weights[prefix + name.removeprefix("weight/")], right, name)


LAYER = "blocks.0.mlp.fc1"
UNREADABLE = {
    "nvfp4": ({"comfy_quant": lambda _: mark("nvfp4")}, "nvfp4"),
    "format that is no text": ({"comfy_quant": lambda _: mark(["int8"])}, "int8"),
    "unknown setting": ({"comfy_quant": lambda _: mark("int8_tensorwise", turned=True)}, "turned"),
    "groups of 12": ({"comfy_quant": lambda _: mark("int8_rowwise", convrot=True, convrot_groupsize=12)}, "12"),
    "int8 of no format": ({"comfy_quant": None}, "I8"),
    "int8 alone": ({"comfy_quant": None, "weight_scale": None}, "int8"),
    "another dtype": ({"comfy_quant": lambda _: mark("float8_e4m3fn")}, "I8"),
    "no scale": ({"weight_scale": None}, "scale"),
    "scale of another shape": ({"weight_scale": lambda scale: scale[:7]}, "scale"),
    "bfloat16 with a scale": ({"comfy_quant": None, "weight": lambda weight: weight.bfloat16()}, "BF16"),
    "scale without a weight": ({"weight": None}, "no weight"),
    "bitsandbytes": ({"weight.quant_state.bitsandbytes__nf4": lambda _: mark("x")}, "nf4"),
    "torchao": ({"_weight_qdata": lambda _: mark("x")}, "torchao"),
    "ModelOpt": ({"weight_scale_2": lambda _: mark("x")}, "nvfp4"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_layer_in_an_unknown_format_is_refused(case, tmp_path):
    stored = comfy_mixed()
    for last, change in UNREADABLE[case][0].items():
        tensor = stored.pop(f"{LAYER}.{last}", None)
        stored |= {f"{LAYER}.{last}": change(tensor)} if change else {}
    save_file(stored, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=rf"{re.escape(LAYER)}\b.*{UNREADABLE[case][1]}"):
        single_files.read_safetensors(tmp_path / "a.safetensors")


def test_integers_for_weights_of_a_pt_file_are_refused(tmp_path):
    write_torch_file(tmp_path / "a.pt", {"blocks.0.attn.qkv.weight": np.ones((6, 2), np.int8)})
    pytest.raises(CheckpointError, single_files.read_pt, tmp_path / "a.pt").match(r"blocks\.0\.attn\.qkv.*int8")


SIZES = {"num_attention_heads": 2, "attention_head_dim": 8, "text_dim": 64, "freq_dim": 16, "ffn_dim": 24,
         "num_layers": 2, "in_channels": 1, "out_channels": 1, "patch_size": (3, 8, 8)}  # fmt: skip


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return diffusers.WanTransformer3DModel(**SIZES)


@pytest.mark.parametrize("largest", ["10GB", "20KB"], ids=["one file", "several"])
def test_folder_is_converted_tensor_by_tensor(network, tmp_path, largest, capsys):
    network.save_pretrained(tmp_path / "wan", max_shard_size=largest)
    assert (len(list((tmp_path / "wan").glob("*.safetensors"))) > 1) == (largest == "20KB")
    conversion = ["convert", str(tmp_path / "wan"), str(tmp_path / "wan.safetensors")]
    assert main(conversion) == 0
    assert_same(read_safetensors(tmp_path / "wan.safetensors").weights, arrays_of(network))
    if largest == "20KB":
        next((tmp_path / "wan").glob("*00001*.safetensors")).unlink()
        assert main([*conversion, "--overwrite"]) == 2 and "00001-of" in capsys.readouterr().err
        index = tmp_path / "wan/diffusion_pytorch_model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
        assert main([*conversion, "--overwrite"]) == 2 and "'../elsewhere.safetensors'" in capsys.readouterr().err


def arrays_of(network):
    return {name: value.numpy() for name, value in network.state_dict().items()}


IMAGE = {"in_channels": 6, "image_dim": 10, "added_kv_proj_dim": 16, "pos_embed_seq_len": 4}


@pytest.mark.parametrize("settings", [{"in_channels": 6}, IMAGE], ids=["2.2", "2.1"])
def test_text_to_video_network_begins_one_from_an_image(network, tmp_path, settings):
    network.save_pretrained(tmp_path / "wan")
    config = WanConfig(**{**SIZES, **settings}, latent_size=(3, 16, 16))
    ours, begun = Wan(config), adapt_weights(read_source(tmp_path / "wan", config), config, (), 0)
    ours.load_state_dict({own.name: torch.from_numpy(own.value) for own in begun})
    torch.manual_seed(1)
    x, t, text = torch.randn(2, 1, 3, 16, 16), torch.tensor([900.0, 30.0]), torch.randn(2, 5, 64)
    given = {name: torch.from_numpy(array) for name, array in config.conditions.examples(2).items() if name != "text"}
    with torch.no_grad():
        torch.testing.assert_close(ours(x, t, text, *given.values()), network(x, t, text).sample, rtol=1e-4, atol=1e-5)
    said = {own.name: own.how for own in begun if own.how}
    assert said["patch_embedding.weight"] == "zeros for the 5 channels of the conditioning frames"


def test_the_names_of_wan_s_own_code_are_read_as_diffusers_reads_them():
    block = [f"{a}_attn.{x}" for a in ("self", "cross") for x in ("q", "k", "v", "o", "norm_q", "norm_k")]
    block += ["cross_attn.k_img", "cross_attn.v_img", "cross_attn.norm_k_img", "ffn.0", "ffn.2", "norm3"]
    ends = ("patch_embedding", "time_embedding.0", "time_embedding.2", "time_projection.1", "text_embedding.0",
            "text_embedding.2", "head.head", *(f"img_emb.proj.{number}" for number in (0, 1, 3, 4)))  # fmt: skip
    layers = [*ends, *(f"blocks.{number}.{name}" for number in (0, 11) for name in block)]
    names = [f"{layer}.{last}" for layer in layers for last in ("weight", "bias")]
    names += ["head.modulation", "blocks.0.modulation", "blocks.11.modulation"]
    theirs = single_file_utils.convert_wan_transformer_to_diffusers({name: number for number, name in enumerate(names)})
    assert from_original({name: np.array(number) for number, name in enumerate(names)}) == theirs


@pytest.mark.parametrize(("said", "shift"), [({"flow_shift": 3.0}, 3.0), ({"shift": 7.0}, 7.0), ({}, 1.0), (None, 5.0)])
def test_shift_is_that_of_the_scheduler_or_the_published_one(tmp_path, said, shift):
    files = {"model_index.json": {"_class_name": "WanPipeline"}, "transformer/config.json": {}}
    files |= {} if said is None else {"scheduler/scheduler_config.json": said}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content))
    assert wan_model_of(tmp_path)["diffusion"]["shift"] == shift
