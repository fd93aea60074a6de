"""Weights of FLUX, SD3, Qwen-Image, Z-Image and Wan: diffusers' folders and single files under their authors' names."""

import json
import re

import numpy as np
import pytest

from mindspeed_mm_dit.checkpoint.state import State
from mindspeed_mm_dit.checkpoint.targets import check_state
from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.configs.files import read_safetensors_header
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.framework.safetensors_file import read_safetensors_file
from mindspeed_mm_dit.framework.torch_file import write_torch_file
from mindspeed_mm_dit.integrations.formats import diffusers_folder, families, single_files
from mindspeed_mm_dit.integrations.formats.families import to_original_names
from mindspeed_mm_dit.integrations.formats.quantized import read_quantized
from mindspeed_mm_dit.integrations.formats.single_files import plain, recognised
from tests.checkpoint_fixtures import assert_same, needs_diffusers
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


@pytest.mark.parametrize(
    ("name", "key", "expected"),
    [("flux_schnell_tiny", "axes_dims_rope", [2, 4, 6]), ("sd3_tiny", "num_attention_heads", 1),
     ("wan21_i2v_tiny", "attention_head_dim", 28)],
)  # fmt: skip
def test_settings_that_no_tensor_shows_are_assumed_and_named(name, key, expected, tmp_path, capsys):
    single_files.write_arrays(tmp_path / "a.safetensors", weights_of(GOLDEN / name), {})
    convert(tmp_path / "a.safetensors", tmp_path / "folder", "--to", "diffusers")
    assert re.search(f"assumed, as .*{key} = {re.escape(str(expected))}", capsys.readouterr().out)
    assert config_of(tmp_path / "folder")[key] == expected != config_of(GOLDEN / name)[key]


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [("flux_tiny", "out_channels", 32), ("sd3_tiny", "patch_size", 1), ("sd3_tiny", "out_channels", 8),
     ("qwenimage_tiny", "out_channels", 9), ("zimage_tiny", "n_kv_heads", 7)],
)  # fmt: skip
def test_a_value_that_is_not_supported_is_called_so(name, key, value, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_of(GOLDEN / name) | {key: value}))
    (tmp_path / "diffusion_pytorch_model.safetensors").symlink_to(*(GOLDEN / name).glob("*.safetensors"))
    with pytest.raises(CheckpointError, match=f"{key} = {value}: is not supported, only "):
        diffusers_folder.read(tmp_path)


@needs_diffusers
@pytest.mark.parametrize("name", ["flux_tiny", "flux_schnell_tiny", "sd3_tiny", "sd35_tiny"])
def test_diffusers_reads_the_same_from_a_file_of_the_authors(name, tmp_path, monkeypatch):
    import torch
    from diffusers.loaders import single_file_utils

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
    torch = pytest.importorskip("torch")
    stored, meant = {}, {}
    for name, array in weights.items():
        tensor = torch.from_numpy(array.copy())
        scale = torch.ones(())
        if array.ndim > 1 and form != "cast":
            scale = tensor.abs().amax(1, keepdim=True) if form == "rows" else tensor.abs().max()
            scale = scale / 448
        low = (tensor / scale).to(torch.float8_e4m3fn)
        stored[name], meant[name] = low, (low.float() * scale).numpy()
        stem = name.removesuffix(".weight")
        if array.ndim > 1 and form == "comfyui":
            stored |= {f"{stem}.scale_weight": scale, f"{stem}.scale_input": torch.ones(())}
        elif array.ndim > 1 and form == "blocks":
            sides = [-(-side // 128) for side in array.shape]
            stored[f"{stem}.weight_scale_inv"] = scale.expand(*sides).clone()
        elif array.ndim > 1 and form == "rows":
            stored[f"{stem}.weight_scale"] = scale
    return (stored | {"scaled_fp8": torch.ones(2).to(torch.float8_e4m3fn)} if form == "comfyui" else stored), meant


@pytest.mark.parametrize(
    ("form", "place"), [("cast", "file"), ("comfyui", "file"), ("rows", "folder"), ("blocks", "file")]
)
def test_weights_in_float8_are_multiplied_by_their_scales(form, place, tmp_path, capsys):
    save_file = pytest.importorskip("safetensors.torch").save_file
    stored, meant = in_float8(weights_of(GOLDEN / "flux_tiny"), form)
    path = tmp_path / "low.safetensors"
    if place == "folder":
        (tmp_path / "low").mkdir()
        (tmp_path / "low/config.json").write_bytes((GOLDEN / "flux_tiny/config.json").read_bytes())
        path = tmp_path / "low/diffusion_pytorch_model.safetensors"
    save_file(stored, path)
    convert(tmp_path / "low" if place == "folder" else path, tmp_path / "wide.safetensors")
    assert_same(weights_of(tmp_path / "wide.safetensors"), meant)
    assert "tensors are stored in float8" in capsys.readouterr().out
    if form != "cast":
        scales = [name for name in stored if "scale" in name and "input" not in name]
        for missing in (scales[-2:-1], scales, [*scales, *(name for name in stored if "_input" in name)]):
            save_file({name: tensor for name, tensor in stored.items() if name not in missing}, path)
            with pytest.raises(CheckpointError, match="is in float8, and its scale is missing"):
                single_files.read_stored([path], path)


def test_scales_by_block_may_be_as_many_as_rows():
    scale = np.arange(1, 129, dtype=np.float32).reshape(1, 128)
    stored = {"a.weight": np.full((128, 128 * 128), 0x38, np.uint8), "a.weight_scale_inv": scale}  # (ones)
    found, _ = read_quantized(stored, {"a.weight": "F8_E4M3"}, {}, "low.safetensors")
    np.testing.assert_array_equal(found["a.weight"], np.broadcast_to(scale.repeat(128, 1), (128, 128 * 128)))


def mark(format_name, **settings):
    torch = pytest.importorskip("torch")
    return torch.tensor(list(json.dumps({"format": format_name, **settings}).encode()), dtype=torch.uint8)


def comfy_mixed():
    load_file = pytest.importorskip("safetensors.torch").load_file
    return load_file(GOLDEN / "quant_dit_tiny/comfy_mixed.safetensors")


@pytest.mark.parametrize("form", ["marks", "header", "whole checkpoint", "float8 as bytes"])
def test_float8_and_int8_equal_the_numbers_of_comfy_kitchen(form, tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
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
    pytest.importorskip("safetensors.torch").save_file(stored, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=rf"{re.escape(LAYER)}\b.*{UNREADABLE[case][1]}"):
        single_files.read_safetensors(tmp_path / "a.safetensors")


def test_integers_for_weights_of_a_pt_file_are_refused(tmp_path):
    write_torch_file(tmp_path / "a.pt", {"blocks.0.attn.qkv.weight": np.ones((6, 2), np.int8)})
    with pytest.raises(CheckpointError, match=r"blocks\.0\.attn\.qkv\.weight: .*int8"):
        single_files.read_pt(tmp_path / "a.pt")
