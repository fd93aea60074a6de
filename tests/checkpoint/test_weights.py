from __future__ import annotations

import argparse

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mindspeed_mm_dit.checkpoint.compatibility import check_names
from mindspeed_mm_dit.checkpoint.weights import read_weights
from mindspeed_mm_dit.errors import CheckpointError
from tests.conftest import GOLDEN

TENSORS = {"a.weight": torch.randn(3, 2), "b.bias": torch.randn(4)}


def test_the_published_training_checkpoint_is_read_without_unpickling_code():
    weights = read_weights(GOLDEN / "dit_tiny_p2.pt")
    assert weights["blocks.1.attn.qkv.weight"].shape == (192, 64)


@pytest.mark.parametrize("use_ema", [True, False])
def test_the_average_is_preferred_where_there_are_both(tmp_path, use_ema):
    average = {name: value + 1 for name, value in TENSORS.items()}
    torch.save({"model": TENSORS, "ema": average, "opt": {}, "args": argparse.Namespace(a=1)}, tmp_path / "f.pt")
    found = read_weights(tmp_path / "f.pt", use_ema)["b.bias"]
    np.testing.assert_array_equal(found, (average if use_ema else TENSORS)["b.bias"].numpy())


def test_bare_state_dicts_are_read_in_every_format(tmp_path):
    torch.save(TENSORS, tmp_path / "f.pt")
    save_file(TENSORS, tmp_path / "f.safetensors")
    for file in ("f.pt", "f.safetensors"):
        for name, array in read_weights(tmp_path / file).items():
            np.testing.assert_array_equal(array, TENSORS[name].numpy())


@pytest.mark.parametrize("name", ["f.pt", "f.safetensors"])
def test_bfloat16_comes_as_float32(tmp_path, name):
    low = {"w": TENSORS["b.bias"].bfloat16()}
    (torch.save if name == "f.pt" else save_file)(low, tmp_path / name)
    weights = read_weights(tmp_path / name)
    assert weights["w"].dtype == np.float32
    np.testing.assert_array_equal(weights["w"], low["w"].float().numpy())


class Harmful:
    def __reduce__(self):
        return (print, ("code ran",))


def test_a_file_with_code_in_it_is_refused(tmp_path, capsys):
    torch.save({"model": Harmful()}, tmp_path / "f.pt")
    with pytest.raises(CheckpointError, match="print"):
        read_weights(tmp_path / "f.pt")
    assert "code ran" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["cut.pt", "cut.safetensors", "weights.gguf"])
def test_a_damaged_or_unknown_file_is_an_error(tmp_path, name):
    (tmp_path / name).write_bytes(b"not a checkpoint")
    with pytest.raises(CheckpointError, match=name):
        read_weights(tmp_path / name)


def test_a_folder_that_is_no_checkpoint_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="is a folder and no checkpoint"):
        read_weights(tmp_path)


def test_differing_tensors_are_named():
    with pytest.raises(CheckpointError) as caught:
        check_names({"a": (2, 2), "b": (1,)}, {"a": (2, 3), "c": (1,)}, "file")
    for part in ("b is missing", "c is not in this model", "a is (2, 3), this model has (2, 2)"):
        assert part in str(caught.value)
