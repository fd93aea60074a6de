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


def test_the_native_engine_has_our_names_for_the_optimizer_and_its_own_for_the_average() -> None:
    names = mindspeed_mm.their_names(
        [*OURS, "ema.a.weight"], [*OURS, "model.ema.a.weight", "optimizer.param_groups.0.lr"]
    )
    assert names == {**{name: name for name in OURS}, "ema.a.weight": "model.ema.a.weight"}


def test_averages_are_known_by_our_name_whoever_wrote_them() -> None:
    assert mindspeed_mm.our_name("model.ema.a.weight") == "ema.a.weight"
    assert mindspeed_mm.our_name("model.a.weight") == "model.a.weight"
