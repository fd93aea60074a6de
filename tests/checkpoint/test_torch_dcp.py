"""What each rank hands to PyTorch's distributed checkpoint."""

from fractions import Fraction
from pathlib import Path

import pytest
import torch

from mindspeed_mm_dit.checkpoint import mindspeed_mm, torch_dcp
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


@pytest.mark.parametrize(("name", "reason"), [("a.weight", "str"), ("a.bias", "fractions")])
def test_a_step_counter_that_is_no_number_is_not_loaded(tmp_path: Path, name: str, reason: str):
    torch_dcp.write(hosted(NAMES, ("seven", Fraction(8))), tmp_path)
    pytest.raises(CheckpointError, torch_dcp.read, empty(name), tmp_path).match(reason)


PARAMETERS = ("a.weight", "a.bias", "b.weight", "b.bias")
OURS = [f"optimizer.state.{name}.{kind}" for name in PARAMETERS for kind in ("exp_avg", "step")]


def stored(groups: int, own_step: bool = False) -> list[str]:
    names = [f"optimizer.state.{i}.exp_avg" for i in range(4)]
    names += [f"optimizer.state.{i}.step" for i in range(4)] if own_step else []
    return names + [f"optimizer.param_groups.{group}.step" for group in range(groups)]


def by_name(owners: tuple[str, ...] = PARAMETERS) -> list[str]:
    """A checkpoint whose optimizer calls parameters by their names, in the order of its groups."""
    names = [f"optimizer.state.predictor.{name}.exp_avg" for name in sorted(owners, key=lambda name: ".bias" in name)]
    return names + [f"optimizer.param_groups.{group}.step" for group in (0, 1)]


@pytest.mark.parametrize(("theirs", "owners", "steps"), [
    (stored(2), "0 2 1 3", "param_groups.0 param_groups.1 param_groups.0 param_groups.1"),  # weights, then biases
    (stored(1), "0 1 2 3", "param_groups.0 " * 4),
    (stored(2, own_step=True), "0 2 1 3", "state.0 state.2 state.1 state.3"),
    (by_name(), " ".join(f"predictor.{name}" for name in PARAMETERS), "param_groups.0 param_groups.1 " * 2),
])  # fmt: skip
def test_moments_and_steps_are_found_under_the_names_of_the_host(theirs, owners, steps) -> None:
    names = mindspeed_mm.stored_names(OURS, theirs)
    for name, owner, step in zip(PARAMETERS, owners.split(), steps.split(), strict=True):
        assert names[f"optimizer.state.{name}.exp_avg"] == f"optimizer.state.{owner}.exp_avg"
        assert names[f"optimizer.state.{name}.step"] == f"optimizer.{step}.step"


def test_both_forms_are_theirs_and_averages_have_names_of_their_own():
    assert mindspeed_mm.is_mindspeed_mm(stored(groups=0)) and mindspeed_mm.is_mindspeed_mm(by_name()[:1])
    assert not mindspeed_mm.is_mindspeed_mm(OURS)
    names = mindspeed_mm.stored_names(["ema.a.weight"], by_name(PARAMETERS[:1]))
    assert names == {"ema.a.weight": "model.ema.a.weight"}
    native = [*OURS, "model.ema.a.weight", "optimizer.param_groups.0.lr"]
    names = mindspeed_mm.stored_names([*OURS, "ema.a.weight"], native)
    assert names == {**{name: name for name in OURS}, "ema.a.weight": "model.ema.a.weight"}
    assert mindspeed_mm.to_project_name("model.ema.a.weight") == "ema.a.weight"
    assert mindspeed_mm.to_project_name("model.a.weight") == "model.a.weight"


@pytest.mark.parametrize(("ours", "theirs", "words"), [
    (OURS[:-2], stored(groups=2), "has 4 parameters, but this model trains 3"),
    (OURS, by_name(("a.weight", "a.bias", "b.weight", "c.bias")), r"no moments of b\.bias"),
    (OURS, by_name(PARAMETERS[:3]), "has 3 parameters, but this model trains 4"),
])  # fmt: skip
def test_moments_of_other_parameters_are_refused(ours, theirs, words) -> None:
    pytest.raises(CheckpointError, mindspeed_mm.stored_names, ours, theirs).match(words)
