"""Weights of Wan as diffusers keeps them: one file or several, converted, and begun from."""

from __future__ import annotations

import json

import diffusers
import numpy as np
import pytest
import torch

from mindspeed_mm_dit.checkpoint.formats import safetensors
from mindspeed_mm_dit.cli.main import main
from tests.clips_fixtures import clip_configs, write_clips

SIZES = {"num_attention_heads": 2, "attention_head_dim": 8, "text_dim": 64, "freq_dim": 16, "ffn_dim": 24,
         "num_layers": 2, "in_channels": 1, "out_channels": 1, "patch_size": (3, 8, 8)}  # fmt: skip


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return diffusers.WanTransformer3DModel(**SIZES)


@pytest.mark.parametrize("largest", ["10GB", "20KB"], ids=["one file", "several"])
def test_a_folder_is_converted_tensor_by_tensor(network, tmp_path, largest, capsys):
    network.save_pretrained(tmp_path / "wan", max_shard_size=largest)
    assert (len(list((tmp_path / "wan").glob("*.safetensors"))) > 1) == (largest == "20KB")
    assert main(["convert", str(tmp_path / "wan"), str(tmp_path / "wan.safetensors")]) == 0
    weights = safetensors.read(tmp_path / "wan.safetensors").weights
    theirs = {name: value.numpy() for name, value in network.state_dict().items()}
    assert weights.keys() == theirs.keys()
    assert all(np.array_equal(weights[name], theirs[name]) for name in theirs)
    assert "frequencies" not in capsys.readouterr().out  # a caveat of DiT's


def test_a_part_that_is_missing_is_named(network, tmp_path, capsys):
    network.save_pretrained(tmp_path / "wan", max_shard_size="20KB")
    next((tmp_path / "wan").glob("*00001*.safetensors")).unlink()
    assert main(["convert", str(tmp_path / "wan"), str(tmp_path / "wan.safetensors")]) == 2
    assert "00001-of" in capsys.readouterr().err
    index = tmp_path / "wan/diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
    assert main(["convert", str(tmp_path / "wan"), str(tmp_path / "wan.safetensors")]) == 2
    assert "names '../elsewhere.safetensors', which is no file beside it" in capsys.readouterr().err


@pytest.mark.ranks
def test_a_run_begins_with_it(network, tmp_path):
    pytest.importorskip("av", reason="requirements/video.txt")
    pytest.importorskip("transformers", reason="requirements/video.txt")
    network.save_pretrained(tmp_path / "wan")
    configs = clip_configs(tmp_path / "configs", write_clips(tmp_path), predictor="wan")
    flags = f"--train-iters 1 --global-batch-size 4 --lr 1e-12 --init-from {tmp_path}/wan --save {tmp_path}/out"
    outcome = configs.run(flags)
    assert outcome.code == 0, outcome.output
    assert main(["convert", f"{tmp_path}/out", f"{tmp_path}/out.safetensors", "--weights", "model"]) == 0
    weights = safetensors.read(tmp_path / "out.safetensors").weights
    for name, value in network.state_dict().items():
        np.testing.assert_allclose(weights[name], value.numpy(), rtol=1e-6, atol=1e-9, err_msg=name)
