import argparse

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mindspeed_mm_dit.checkpoint.formats import FORMATS, read_weights
from mindspeed_mm_dit.checkpoint.state import check_names
from mindspeed_mm_dit.errors import CheckpointError

TENSORS = {"a.weight": torch.randn(3, 2), "b.bias": torch.randn(4)}


def test_average_is_preferred_where_there_are_both(tmp_path):
    average = {name: value + 1 for name, value in TENSORS.items()}
    torch.save({"model": TENSORS, "ema": average, "opt": {}, "args": argparse.Namespace(a=1)}, tmp_path / "f.pt")
    for use_ema, tensors in ((True, average), (False, TENSORS)):
        np.testing.assert_array_equal(read_weights(tmp_path / "f.pt", use_ema)["b.bias"], tensors["b.bias"].numpy())


def below(prefix):
    return {f"{prefix}{name}": value for name, value in TENSORS.items()}


WRAPPED = {
    "torch.compile": below("_orig_mod."), "DDP": below("module."), "both": below("module._orig_mod."),
    "Lightning": {"state_dict": below("model."), "epoch": 1}, "DeepSpeed": {"module": TENSORS, "dp_world_size": 1},
    "Lightning, compiled": {"state_dict": below("model._orig_mod.")}, "state dicts": {"ema_state_dict": TENSORS},
    "a weighted average": {"n_averaged": torch.tensor(3), **below("module.")},
    "latent diffusion": below("model.diffusion_model."),
    "a compiled average": {"model": TENSORS, "ema": below("_orig_mod."), "opt": {}},
    "both in one module": {"state_dict": {**below("model."), **below("ema.")}},
}  # fmt: skip


@pytest.mark.parametrize("wrapper", WRAPPED)
def test_names_lose_the_prefixes_of_whatever_was_around_the_network(tmp_path, wrapper):
    torch.save(WRAPPED[wrapper], tmp_path / "f.pt")
    assert read_weights(tmp_path / "f.pt").keys() == TENSORS.keys()
    assert all(tree.keys() == TENSORS.keys() for tree in FORMATS["pt"].read(tmp_path / "f.pt").trees.values())
    if all(isinstance(value, torch.Tensor) for value in WRAPPED[wrapper].values()):
        save_file(WRAPPED[wrapper], tmp_path / "f.safetensors")
        assert read_weights(tmp_path / "f.safetensors").keys() == TENSORS.keys()


@pytest.mark.parametrize("name", ["f.pt", "f.safetensors"])
def test_bare_state_dict_is_read_bfloat16_as_float32(tmp_path, name):
    tensors = TENSORS | {"w": TENSORS["b.bias"].bfloat16()}
    (torch.save if name == "f.pt" else save_file)(tensors, tmp_path / name)
    for key, array in read_weights(tmp_path / name).items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, tensors[key].float().numpy())


class Harmful:
    def __reduce__(self):
        return (print, ("code ran",))


def test_a_file_with_code_in_it_is_refused(tmp_path, capsys):
    torch.save({"model": Harmful()}, tmp_path / "f.pt")
    pytest.raises(CheckpointError, read_weights, tmp_path / "f.pt").match("print")
    assert "code ran" not in capsys.readouterr().out


def test_damaged_or_unknown_file_is_refused(tmp_path):
    for name in ("cut.pt", "cut.safetensors", "weights.gguf"):
        (tmp_path / name).write_bytes(b"not a checkpoint")
        pytest.raises(CheckpointError, read_weights, tmp_path / name).match(name)
    pytest.raises(CheckpointError, read_weights, tmp_path).match("is a folder and no checkpoint")


def test_differing_tensors_are_named():
    wanted = {"a": (2, 2), **{f"layer.{number}": (1,) for number in range(9)}}
    found = {"a": (2, 3), **{f"net.{number}": (1,) for number in range(9)}}
    with pytest.raises(CheckpointError) as caught:  # names that are missing never hide those that are there
        check_names(wanted, found, "file")
    for part in ("layer.0 is missing", "net.0 is not in this model", "a is (2, 3), this model has (2, 2)"):
        assert part in str(caught.value)
