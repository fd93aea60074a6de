"""The kinds of condition by class, and functions that handle all conditions of a predictor at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed_mm_dit.configs.condition import Condition, Conditions
from mindspeed_mm_dit.data.conditions.contract import Arrays, ConditionKind
from mindspeed_mm_dit.registry import Registry

CONDITIONS = Registry[ConditionKind]("condition")
"""By the qualified name of a condition's class."""


def register_condition(condition: type[Condition], kind: ConditionKind) -> None:
    """Add a kind of condition; raises ConfigError if its class is already registered with another kind."""
    CONDITIONS[_qualified_name(condition)] = kind


def kind_of(condition: Condition) -> ConditionKind:
    """Return the kind of a condition."""
    return CONDITIONS[_qualified_name(type(condition))]


def _qualified_name(condition: type[Condition]) -> str:
    return f"{condition.__module__}.{condition.__qualname__}"


def request_arrays(conditions: Conditions, values: Mapping[str, Any], tokenizers: Sequence[Any]) -> Arrays:
    """Return the arrays for requested samples; ``values``: by item, one per sample."""
    none = [None] * len(next(iter(values.values())))
    return {
        name: array
        for condition in conditions
        for name, array in kind_of(condition)
        .request_arrays(condition, values.get(condition.item, none), tokenizers)
        .items()
    }


def unconditional_arrays(conditions: Conditions, instead: Mapping[str, Any], tokenizers: Sequence[Any]) -> Arrays:
    """Return the arrays for one unconditional sample; ``instead``: negative prompts of guidance, by item."""
    return {
        name: array
        for condition in conditions
        for name, array in kind_of(condition).unconditional(condition, instead.get(condition.item), tokenizers).items()
    }


def encoded(conditions: Conditions, batch: Mapping[str, Any], model: Any) -> tuple[Any, ...]:
    """Return the network's inputs in the order of ``conditions.names``, from a batch and the encoders of ``model``."""
    return tuple(tensor for condition in conditions for tensor in kind_of(condition).encode(condition, batch, model))
