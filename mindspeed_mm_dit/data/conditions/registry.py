"""The kinds of condition, by the class that a predictor's config answers with; conditions of all kinds at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed_mm_dit.configs.condition import ClassLabel, Condition, Conditions, PooledText, TextStates, Vector
from mindspeed_mm_dit.data.conditions.contract import Arrays, ConditionKind
from mindspeed_mm_dit.data.conditions.plain import LABEL, VECTOR
from mindspeed_mm_dit.data.conditions.text import TEXT
from mindspeed_mm_dit.errors import ConfigError

CONDITIONS: dict[type, ConditionKind] = {ClassLabel: LABEL, TextStates: TEXT, PooledText: TEXT, Vector: VECTOR}


def register_condition(condition: type[Condition], kind: ConditionKind) -> None:
    """Add a kind of condition; raises ConfigError where its class is another one's."""
    if CONDITIONS.get(condition, kind) is not kind:
        raise ConfigError(f"condition {condition.__name__}", "is registered already", "choose another class")
    CONDITIONS[condition] = kind


def kind_of(condition: Condition) -> ConditionKind:
    """Return the record of a condition."""
    return CONDITIONS[type(condition)]


def arrays_asked(conditions: Conditions, values: Mapping[str, Any], tokenizers: Sequence[Any]) -> Arrays:
    """Return the arrays of samples that are asked for; ``values``: by item, one for each sample."""
    return {
        name: array
        for condition in conditions
        for name, array in kind_of(condition).asked(condition, values[condition.item], tokenizers).items()
    }


def null_arrays(conditions: Conditions, instead: Mapping[str, Any], tokenizers: Sequence[Any]) -> Arrays:
    """Return the arrays of one sample without conditions; ``instead``: what guidance leads away from, by item."""
    return {
        name: array
        for condition in conditions
        for name, array in kind_of(condition).null(condition, instead.get(condition.item), tokenizers).items()
    }


def encoded(conditions: Conditions, batch: Mapping[str, Any], encoders: Sequence[Any]) -> tuple[Any, ...]:
    """Return what the network takes, in the order of ``conditions.names``, from the tensors of a batch."""
    return tuple(tensor for condition in conditions for tensor in kind_of(condition).encode(condition, batch, encoders))
