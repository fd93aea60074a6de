"""Names of tensors across hosts, and DiT weights under diffusers' names."""

import pytest

from mindspeed_mm_dit.checkpoint import mindspeed_mm
from mindspeed_mm_dit.errors import CheckpointError

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


def test_both_forms_are_theirs_and_ours_is_not() -> None:
    assert mindspeed_mm.is_mindspeed_mm(stored(groups=0)) and mindspeed_mm.is_mindspeed_mm(by_name()[:1])
    assert not mindspeed_mm.is_mindspeed_mm(OURS)


@pytest.mark.parametrize(("ours", "theirs", "words"), [
    (OURS[:-2], stored(groups=2), "has 4 parameters, this model trains 3"),
    (OURS, by_name(("a.weight", "a.bias", "b.weight", "c.bias")), r"no moments of b\.bias"),
    (OURS, by_name(PARAMETERS[:3]), "has 3 parameters, this model trains 4"),
])  # fmt: skip
def test_moments_of_other_parameters_are_refused(ours, theirs, words) -> None:
    pytest.raises(CheckpointError, mindspeed_mm.stored_names, ours, theirs).match(words)


def test_averages_and_the_native_engine_have_names_of_their_own() -> None:
    assert mindspeed_mm.stored_names(["ema.a.weight"], by_name(PARAMETERS[:1])) == {
        "ema.a.weight": "model.ema.a.weight"
    }
    native = [*OURS, "model.ema.a.weight", "optimizer.param_groups.0.lr"]
    names = mindspeed_mm.stored_names([*OURS, "ema.a.weight"], native)
    assert names == {**{name: name for name in OURS}, "ema.a.weight": "model.ema.a.weight"}
    assert mindspeed_mm.to_project_name("model.ema.a.weight") == "ema.a.weight"
    assert mindspeed_mm.to_project_name("model.a.weight") == "model.a.weight"
