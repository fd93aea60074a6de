"""What a kind of condition offers, as one record; ``registry.py`` finds it by the class of the condition."""

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
class Fed:
    """What the arrays of a condition are made from in training."""

    rows: Rows
    seed: int
    coin: int
    """Number of its coin among those of the predictor's conditions."""
    caption_dropout_prob: float
    """Of data.json."""
    tokenizers: Sequence[Any]
    """Of each text encoder of model.json; none where a cache has what they read."""
    cache: Any = None
    """The cache of the rows; None without one."""

    def drops(self, sample_indices: np.ndarray, probability: float) -> np.ndarray:
        """Return which samples at ``sample_indices`` (B,) lose the condition, (B,) bool."""
        return coins(self.seed, Stream.LABEL_DROP, sample_indices, probability, self.coin)


class Feed(Protocol):
    """Makes the arrays of a condition for a training batch; called from several threads."""

    def arrays(self, rows: np.ndarray, sample_indices: np.ndarray) -> Arrays:
        """Return them for the samples at ``sample_indices`` (B,) of the run, whose rows are ``rows`` (B,)."""

    def words(self, rows: np.ndarray, sample_indices: np.ndarray) -> list[tuple[str, bool]]:
        """Return the condition of each sample in words, and whether it is dropped there."""


@dataclass(frozen=True)
class ConditionKind:
    """A kind of condition."""

    feed: Callable[[Any, Fed], Feed]
    """(condition, what it is made from) -> what makes its arrays of a training batch."""
    asked: Callable[[Any, Any, Sequence[Any]], Arrays]
    """(condition, a value for each sample, tokenizers) -> the same arrays of samples that are asked for."""
    null: Callable[[Any, Any, Sequence[Any]], Arrays]
    """(condition, what to lead away from or None, tokenizers) -> the same arrays of one sample without it."""
    encode: Callable[[Any, Mapping[str, Tensor], Sequence[Any]], tuple[Tensor, ...]]
    """(condition, tensors of a batch, text encoders) -> what the network takes, in the order of its names."""
    kept: Callable[[Any, Any, Any], Mapping[str, np.ndarray]] | None = None
    """(condition, captions, text encoders) -> what a cache keeps for these; None where nothing is encoded."""


__all__ = ["Arrays", "Condition", "ConditionKind", "Fed", "Feed"]
