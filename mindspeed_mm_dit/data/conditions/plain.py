"""Conditions that need no encoder: class labels, and vectors that come with the samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.condition import Condition, Vector
from mindspeed_mm_dit.data.conditions.contract import Arrays, ConditionBatch, ConditionKind
from mindspeed_mm_dit.errors import ConfigError, DataError


class PlainCollator:
    """Adds the values of rows, some of them replaced by the unconditional value."""

    dtype: type = np.int64

    def __init__(self, condition: Condition, inputs: ConditionBatch) -> None:
        self._condition, self._inputs = condition, inputs
        self._values = inputs.rows.items[condition.item]

    def arrays(self, rows: np.ndarray, sample_indices: np.ndarray) -> Arrays:
        arrays: Arrays = {self._condition.names[0]: np.asarray(self._values[rows], self.dtype)}
        return self._condition.dropped(arrays, self._drops(sample_indices))

    def words(self, rows: np.ndarray, sample_indices: np.ndarray) -> list[tuple[str, bool]]:
        names = [self._inputs.rows.classes[label] for label in self._values[rows].tolist()]
        return list(zip(names, self._drops(sample_indices).tolist()))

    def _drops(self, sample_indices: np.ndarray) -> np.ndarray:
        return self._inputs.drops(sample_indices, self._condition.dropout)


class VectorCollator(PlainCollator):
    """The same for vectors.

    Raises ConfigError if their width is not the one the predictor takes, DataError if one is not finite.
    """

    dtype = np.float32

    def __init__(self, condition: Vector, inputs: ConditionBatch) -> None:
        super().__init__(condition, inputs)
        if self._values.shape[1:] != (condition.width,):
            raise ConfigError(
                f"predictor: {condition.name} of width {condition.width}",
                f"the samples have vectors of {self._values.shape[1:]}",
                "make the two agree",
            )
        bad = ~np.isfinite(self._values).all(1)
        if bad.any():
            raise DataError(inputs.rows.paths[int(bad.argmax())], "has a vector that is not finite", "make it again")

    def words(self, rows: np.ndarray, sample_indices: np.ndarray) -> list[tuple[str, bool]]:
        return [("a vector", drop) for drop in self._drops(sample_indices).tolist()]


def _plain_kind(collator: Callable[[Any, ConditionBatch], PlainCollator], dtype: type) -> ConditionKind:
    return ConditionKind(
        collator,
        request_arrays=lambda condition, values, tokenizers: {condition.names[0]: np.asarray(values, dtype)},
        unconditional=lambda condition, instead, tokenizers: condition.unconditional(1),
        encode=lambda condition, batch, encoders: (batch[condition.names[0]],),
    )


LABEL, VECTOR = _plain_kind(PlainCollator, PlainCollator.dtype), _plain_kind(VectorCollator, VectorCollator.dtype)
