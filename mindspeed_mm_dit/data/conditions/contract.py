"""The interface of a kind of condition, as one record; ``registry.py`` finds it by the condition's class."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mindspeed_mm_dit.configs.condition import Condition
from mindspeed_mm_dit.data.draws import Stream, coins
from mindspeed_mm_dit.data.rows import Rows

Arrays = dict[str, np.ndarray]
Tensor = Any


@dataclass(frozen=True)
class ConditionBatch:
    """The inputs from which a condition's training arrays are made."""

    rows: Rows
    seed: int
    dropout_key: int
    """Key of its dropout draws, among those of the predictor's conditions."""
    caption_dropout_prob: float
    """From data.json."""
    tokenizers: Sequence[Any]
    """One per text encoder of model.json; empty if a cache has the encoded text."""
    cache: Any = None
    """The cache of the rows; None without one."""

    def drops(self, sample_indices: np.ndarray, probability: float) -> np.ndarray:
        """Return which of ``sample_indices`` (B,) lose the condition, (B,) bool."""
        return coins(self.seed, Stream.LABEL_DROP, sample_indices, probability, self.dropout_key)


class ConditionCollator(Protocol):
    """Makes the arrays of a condition for a training batch; called from several threads."""

    def arrays(self, rows: np.ndarray, sample_indices: np.ndarray) -> Arrays:
        """Return the arrays for ``sample_indices`` (B,), whose rows are ``rows`` (B,)."""

    def words(self, rows: np.ndarray, sample_indices: np.ndarray) -> list[tuple[str, bool]]:
        """Return a description of each sample's condition, and whether it is dropped."""


@dataclass(frozen=True)
class ConditionKind:
    """A kind of condition."""

    collator: Callable[[Any, ConditionBatch], ConditionCollator]
    """(condition, inputs) -> the collator that makes its arrays of a training batch."""
    request_arrays: Callable[[Any, Any, Sequence[Any]], Arrays]
    """(condition, a value per sample, tokenizers) -> the same arrays for requested samples."""
    unconditional: Callable[[Any, Any, Sequence[Any]], Arrays]
    """(condition, negative prompt or None, tokenizers) -> the same arrays for one unconditional sample."""
    encode: Callable[[Any, Mapping[str, Tensor], Any], tuple[Tensor, ...]]
    """(condition, tensors of a batch, the composite) -> the network's inputs, in the order of its names."""


__all__ = ["Arrays", "Condition", "ConditionBatch", "ConditionCollator", "ConditionKind"]
