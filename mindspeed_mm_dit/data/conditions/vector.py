"""Vectors that come with the samples, in a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.condition import Vector
from mindspeed_mm_dit.data.conditions.contract import Arrays, ConditionKind, Fed
from mindspeed_mm_dit.errors import ConfigError, DataError


class VectorFeed:
    """The vectors of rows, some of them replaced by zeros.

    Raises DataError where they have another width than the predictor takes, or one is not finite.
    """

    def __init__(self, condition: Vector, fed: Fed) -> None:
        self._condition, self._fed = condition, fed
        vectors = fed.rows.items["vector"]
        if vectors.shape[1:] != (condition.width,):
            raise ConfigError(
                f"predictor: {condition.name} of width {condition.width}",
                f"the samples have vectors of {vectors.shape[1:]}", "make the two agree",
            )  # fmt: skip
        bad = ~np.isfinite(vectors).all(1)
        if bad.any():
            raise DataError(fed.rows.paths[int(bad.argmax())], "has a vector that is not finite", "make it again")

    def arrays(self, rows: np.ndarray, positions: np.ndarray) -> Arrays:
        """Return vectors (B, P) float32."""
        given = {self._condition.name: np.asarray(self._fed.rows.items["vector"][rows], np.float32)}
        return self._condition.dropped(given, self._drops(positions))

    def words(self, rows: np.ndarray, positions: np.ndarray) -> list[tuple[str, bool]]:
        """Return that there is a vector."""
        return [("a vector", drop) for drop in self._drops(positions).tolist()]

    def _drops(self, positions: np.ndarray) -> np.ndarray:
        return self._fed.drops(positions, self._condition.dropout)


def _asked(condition: Vector, vectors: Sequence[Any], tokenizers: Sequence[Any]) -> Arrays:
    return {condition.name: np.asarray(vectors, np.float32)}


def _null(condition: Vector, instead: None, tokenizers: Sequence[Any]) -> Arrays:
    return condition.null(1)


def _encode(condition: Vector, batch: Mapping[str, Any], encoders: Sequence[Any]) -> tuple[Any, ...]:
    return (batch[condition.name],)


VECTOR = ConditionKind(VectorFeed, _asked, _null, _encode)
