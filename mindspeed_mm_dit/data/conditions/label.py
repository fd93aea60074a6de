"""Class labels in a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.condition import ClassLabel
from mindspeed_mm_dit.data.conditions.contract import Arrays, ConditionKind, Fed


class LabelFeed:
    """The labels of rows, some of them replaced by the null class."""

    def __init__(self, condition: ClassLabel, fed: Fed) -> None:
        self._condition, self._fed = condition, fed

    def arrays(self, rows: np.ndarray, positions: np.ndarray) -> Arrays:
        """Return labels (B,) int64."""
        return self._condition.dropped({"labels": self._fed.rows.labels[rows]}, self._drops(positions))

    def words(self, rows: np.ndarray, positions: np.ndarray) -> list[tuple[str, bool]]:
        """Return the names of their classes."""
        names = [self._fed.rows.classes[label] for label in self._fed.rows.labels[rows].tolist()]
        return list(zip(names, self._drops(positions).tolist()))

    def _drops(self, positions: np.ndarray) -> np.ndarray:
        return self._fed.drops(positions, self._condition.dropout)


def _asked(condition: ClassLabel, labels: Sequence[int], tokenizers: Sequence[Any]) -> Arrays:
    return {"labels": np.asarray(labels, np.int64)}


def _null(condition: ClassLabel, instead: None, tokenizers: Sequence[Any]) -> Arrays:
    return condition.null(1)


def _encode(condition: ClassLabel, batch: Mapping[str, Any], encoders: Sequence[Any]) -> tuple[Any, ...]:
    return (batch["labels"],)


LABEL = ConditionKind(LabelFeed, _asked, _null, _encode)
