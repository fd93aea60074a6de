"""Names of tensors across hosts, and DiT weights under diffusers' names."""

from __future__ import annotations

import pytest

from mindspeed_mm_dit.checkpoint import mindspeed_mm
from mindspeed_mm_dit.errors import CheckpointError

PARAMETERS = ("a.weight", "a.bias", "b.weight", "b.bias")
OURS = [f"optimizer.state.{name}.{kind}" for name in PARAMETERS for kind in ("exp_avg", "step")]


def stored(groups: int, own_step: bool = False) -> list[str]:
    names = [f"optimizer.state.{i}.exp_avg" for i in range(4)]
    names += [f"optimizer.state.{i}.step" for i in range(4)] if own_step else []
    return names + [f"optimizer.param_groups.{group}.step" for group in range(groups)]


def test_two_groups_number_the_weights_first_then_the_biases() -> None:
    names = mindspeed_mm.their_names(OURS, stored(groups=2))
    assert [names[f"optimizer.state.{p}.exp_avg"] for p in PARAMETERS] == [
        f"optimizer.state.{number}.exp_avg" for number in (0, 2, 1, 3)
    ]
    assert names["optimizer.state.b.bias.step"] == "optimizer.param_groups.1.step"


def test_one_group_numbers_the_parameters_as_the_model_does() -> None:
    names = mindspeed_mm.their_names(OURS, stored(groups=1))
    assert names["optimizer.state.b.weight.exp_avg"] == "optimizer.state.2.exp_avg"
    assert names["optimizer.state.b.bias.step"] == "optimizer.param_groups.0.step"


def test_a_step_kept_by_parameter_is_found_there() -> None:
    names = mindspeed_mm.their_names(OURS, stored(groups=2, own_step=True))
    assert names["optimizer.state.b.weight.step"] == "optimizer.state.1.step"


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    with pytest.raises(CheckpointError, match="has 4 parameters, this model trains 3"):
        mindspeed_mm.their_names(OURS[:-2], stored(groups=2))


def by_name(owners: tuple[str, ...] = PARAMETERS) -> list[str]:
    """A checkpoint whose optimizer calls parameters by their names, in the order of its groups."""
    names = [f"optimizer.state.predictor.{name}.exp_avg" for name in sorted(owners, key=lambda name: ".bias" in name)]
    return names + [f"optimizer.param_groups.{group}.step" for group in (0, 1)]


def test_parameters_by_name_are_found_by_name() -> None:
    names = mindspeed_mm.their_names(OURS, by_name())
    assert [names[f"optimizer.state.{p}.exp_avg"] for p in PARAMETERS] == [
        f"optimizer.state.predictor.{p}.exp_avg" for p in PARAMETERS
    ]
    assert names["optimizer.state.a.weight.step"] == "optimizer.param_groups.0.step"
    assert names["optimizer.state.b.bias.step"] == "optimizer.param_groups.1.step"


def test_both_forms_are_theirs_and_ours_is_not() -> None:
    assert mindspeed_mm.is_mindspeed_mm(stored(groups=0)) and mindspeed_mm.is_mindspeed_mm(by_name()[:1])
    assert not mindspeed_mm.is_mindspeed_mm(OURS)


def test_moments_of_a_parameter_that_is_not_there_are_named() -> None:
    other = by_name(("a.weight", "a.bias", "b.weight", "c.bias"))
    with pytest.raises(CheckpointError, match=r"has no moments of b\.bias, which this model trains"):
        mindspeed_mm.their_names(OURS, other)
    with pytest.raises(CheckpointError, match="has 3 parameters, this model trains 4"):
        mindspeed_mm.their_names(OURS, by_name(PARAMETERS[:3]))


def test_weights_are_read_whatever_the_optimizer_trains() -> None:
    assert mindspeed_mm.their_names(["ema.a.weight"], by_name(PARAMETERS[:1])) == {"ema.a.weight": "model.ema.a.weight"}


def test_the_native_engine_has_our_names_for_the_optimizer_and_its_own_for_the_average() -> None:
    names = mindspeed_mm.their_names(
        [*OURS, "ema.a.weight"], [*OURS, "model.ema.a.weight", "optimizer.param_groups.0.lr"]
    )
    assert names == {**{name: name for name in OURS}, "ema.a.weight": "model.ema.a.weight"}


def test_averages_are_known_by_our_name_whoever_wrote_them() -> None:
    assert mindspeed_mm.our_name("model.ema.a.weight") == "ema.a.weight"
    assert mindspeed_mm.our_name("model.a.weight") == "model.a.weight"
