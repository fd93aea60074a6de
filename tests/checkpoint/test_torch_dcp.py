"""What each rank hands to PyTorch's distributed checkpoint."""

from fractions import Fraction
from pathlib import Path

import pytest
import torch

from mindspeed_mm_dit.checkpoint import torch_dcp
from mindspeed_mm_dit.checkpoint.torch_dcp import _part_of_this_rank
from mindspeed_mm_dit.errors import CheckpointError


def flat(tree, prefix=""):
    for key, value in tree.items():
        yield from flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]


def test_each_whole_tensor_is_written_by_one_rank():
    state = {tree: {str(i): torch.full((2,), float(i)) for i in range(5)} for tree in ("model", "ema")}
    state["facts"] = {"note": "on every rank"}
    parts = [dict(flat(_part_of_this_rank(state, rank, 3))) for rank in range(3)]
    assert all(part.pop("facts.note") == "on every rank" for part in parts)
    names = [name for part in parts for name in part]
    assert sorted(names) == sorted(name for name, value in flat(state) if isinstance(value, torch.Tensor))
    assert {len(part) for part in parts} == {3, 4}


def hosted(owners: tuple[str, str], steps: tuple[object, object]) -> dict:
    """What a MindSpeed saves of an optimizer with a weight and a bias, each in its group."""
    state = {owner: {kind: torch.full((2,), i + 1.0) for kind in KINDS} for i, owner in enumerate(owners)}
    return {"optimizer": {"state": state, "param_groups": {str(i): {"step": step} for i, step in enumerate(steps)}}}


KINDS = ("exp_avg", "exp_avg_sq")
NUMBERS, NAMES = ("0", "1"), ("predictor.a.weight", "predictor.a.bias")
AS_TENSORS, AS_NUMBERS = (torch.tensor(7), torch.tensor(8)), (7, 8)


def empty(*with_step: str) -> dict:
    """Zeros to read the moments of the weight and the bias into."""
    state = {name: {kind: torch.zeros(2) for kind in KINDS} for name in ("a.bias", "a.weight")}
    for name in with_step:
        state[name]["step"] = torch.zeros(())
    return {"optimizer": {"state": state}}


@pytest.mark.parametrize("owners", [NUMBERS, NAMES])
@pytest.mark.parametrize("steps", [AS_TENSORS, AS_NUMBERS])
def test_moments_of_every_form_of_the_host_are_read(tmp_path: Path, owners, steps):
    torch_dcp.write(hosted(owners, steps), tmp_path)
    ours = empty("a.weight", "a.bias")
    torch_dcp.read(ours, tmp_path)
    for name, value in (("a.weight", 1.0), ("a.bias", 2.0)):
        found = ours["optimizer"]["state"][name]
        assert all(torch.equal(found[kind], torch.full((2,), value)) for kind in KINDS)
        assert found["step"] == value + 6


@pytest.mark.parametrize(
    ("name", "reason"), [("a.weight", "is a str, not a number"), ("a.bias", "its pickle asks for fractions")]
)
def test_a_step_counter_that_is_no_number_is_not_loaded(tmp_path: Path, name: str, reason: str):
    torch_dcp.write(hosted(NAMES, ("seven", Fraction(8))), tmp_path)
    pytest.raises(CheckpointError, torch_dcp.read, empty(name), tmp_path).match(reason)
