"""Weights of FLUX, SD3, Qwen-Image and Z-Image: diffusers' folders and single files under their authors' names."""

from __future__ import annotations

import json

import pytest

from mindspeed_mm_dit.checkpoint.formats import diffusers, safetensors
from mindspeed_mm_dit.cli.main import main
from tests.checkpoint_fixtures import assert_same, needs_diffusers
from tests.conftest import GOLDEN

FAMILIES = {
    "flux_tiny": "double_blocks.1.txt_attn.qkv.bias", "flux_schnell_tiny": "single_blocks.1.linear1.weight",
    "flux2_tiny": "double_blocks.1.img_mlp.2.weight", "sd3_tiny": "joint_blocks.1.x_block.attn.qkv.weight",
    "sd35_tiny": "joint_blocks.0.context_block.attn.ln_q.weight", "zimage_tiny": "layers.1.attention.qkv.weight",
    "qwenimage_tiny": "transformer_blocks.0.img_mod.1.bias",
}  # fmt: skip
"""Folder -> a tensor in a file of the authors."""


def weights_of(path):
    return diffusers.read_arrays(path) if path.is_dir() else safetensors.read(path).weights


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def convert(*arguments):
    assert main(["convert", *map(str, arguments)]) == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_a_folder_of_diffusers_becomes_any_file_and_a_folder_again_bit_by_bit(name, tmp_path, monkeypatch):
    theirs = weights_of(GOLDEN / name)
    source = GOLDEN / name
    for target, *form in (["a.safetensors"], ["b.safetensors", "--to", "original"], ["c.safetensors"]):
        convert(source, tmp_path / target, *form)
        source = tmp_path / target
        assert_same(weights_of(source), theirs)
    convert(source, tmp_path / "folder", "--to", "diffusers")
    assert_same(weights_of(tmp_path / "folder"), theirs)
    assert config_of(tmp_path / "folder") == config_of(GOLDEN / name)
    monkeypatch.setattr(diffusers, "LARGEST_FILE", 30_000)
    convert(source, tmp_path / "parts", "--to", "diffusers")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 2
    assert_same(weights_of(tmp_path / "parts"), theirs)


@pytest.mark.parametrize(("name", "tensor"), FAMILIES.items())
def test_a_file_has_the_names_of_its_authors(name, tensor, tmp_path):
    convert(GOLDEN / name, tmp_path / "a.safetensors", "--to", "original")
    assert tensor in safetensors.read_safetensors_file(tmp_path / "a.safetensors")[0]


@needs_diffusers
@pytest.mark.parametrize("name", ["flux_tiny", "flux_schnell_tiny", "sd3_tiny", "sd35_tiny"])
def test_diffusers_makes_the_same_of_a_file_with_the_names_of_its_authors(name, tmp_path, monkeypatch):
    import torch
    from diffusers.loaders import single_file_utils

    split = torch.split  # (it has FLUX's widths written in)
    monkeypatch.setattr(torch, "split", lambda x, sizes, dim: split(x, [s * len(x) // sum(sizes) for s in sizes], dim))
    convert(GOLDEN / name, tmp_path / "a.safetensors", "--to", "original")
    arrays = safetensors.read_safetensors_file(tmp_path / "a.safetensors")[0]
    kind = "flux" if "flux" in name else "sd3"
    read = getattr(single_file_utils, f"convert_{kind}_transformer_checkpoint_to_diffusers")
    found = read({n: torch.from_numpy(array.copy()) for n, array in arrays.items()})
    assert_same({n: tensor.numpy() for n, tensor in found.items()}, weights_of(GOLDEN / name))
