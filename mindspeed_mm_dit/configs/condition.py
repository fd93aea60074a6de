"""What steers a prediction: the item of a sample it is made of, its arrays, and what stands where it is dropped.

A batch is source arrays, the arrays of each condition, and what the objective draws. The network is called as
``predictor(x_t, t, *condition)``, in the order of ``Conditions.names``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mindspeed_mm_dit.errors import ConfigError

Arrays = dict[str, np.ndarray]


class Condition(ABC):
    """Base of the kinds of condition; a predictor's config says which it takes."""

    item: ClassVar[str]
    """What of a sample it is made of: "label", "caption", "vector"."""
    dropout: float
    """Probability that a training sample gets the null condition, which guidance needs (Ho & Salimans 2022)."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Names of its arrays, each (B, ...), as the network takes them."""

    @property
    def coin(self) -> str:
        """Conditions with the same coin are dropped together; each of the others by its own."""
        return self.names[0]

    @property
    def has_null(self) -> bool:
        """Whether a network trained with it knows the null condition, so that it can be guided."""
        return self.dropout > 0

    @abstractmethod
    def null(self, count: int) -> Arrays:
        """Return the null condition of ``count`` samples; raises ConfigError where an encoder alone can tell it."""

    @abstractmethod
    def examples(self, count: int) -> Arrays:
        """Return ``count`` conditions to try a network with, the null condition last where there is one."""

    def dropped(self, given: Mapping[str, np.ndarray], drops: np.ndarray) -> Arrays:
        """Return the condition ``given`` with the null condition where ``drops`` (B,) is true."""
        null = self.null(len(drops))
        return {
            name: np.where(drops.reshape(-1, *(1 for _ in given[name].shape[1:])), null[name], given[name])
            for name in self.names
        }


@dataclass(frozen=True)
class ClassLabel(Condition):
    """``labels`` (B,) int64: a class each, 0 ... num_classes - 1, or the null class, num_classes."""

    num_classes: int
    dropout: float
    item = "label"
    names = ("labels",)

    def null(self, count: int) -> Arrays:
        return {"labels": np.full(count, self.num_classes, np.int64)}

    def examples(self, count: int) -> Arrays:
        labels = np.arange(count) * 7 % self.num_classes
        if self.has_null:
            labels[-1] = self.num_classes
        return {"labels": labels}


class TextCondition(Condition):
    """Base of those that a text encoder makes of a caption.

    The null condition is the encoding of the empty caption: a text encoder, or a cache that was made with it, has it.
    How often a caption is dropped, data.json says (``caption_dropout_prob``).
    """

    width: int
    encoder: int
    name: str
    setting: str
    shared_coin: str
    item = "caption"
    dropout = 0.0
    has_null = True

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def coin(self) -> str:
        return self.shared_coin or self.name

    def null(self, count: int) -> Arrays:
        """Raise ConfigError: without a text encoder nobody knows it."""
        raise ConfigError(f"predictor: its {self.name}", "has a null value that a text encoder alone can tell")


@dataclass(frozen=True)
class TextStates(TextCondition):
    """``text`` (B, L, D) float32: the states of a text encoder, L tokens of width D."""

    length: int
    width: int
    encoder: int = 0
    """Which of model.json's text encoders reads it."""
    name: str = "text"
    """Name of its array."""
    setting: str = "text_dim"
    """Key of the predictor's section that says ``width``."""
    shared_coin: str = ""
    """Coin that it shares with other conditions; empty: its own."""

    def examples(self, count: int) -> Arrays:
        """Return states of no caption, normally distributed."""
        states = np.random.default_rng(0).standard_normal((count, self.length, self.width), np.float32)
        return {self.name: states}


@dataclass(frozen=True)
class PooledText(TextCondition):
    """``pooled`` (B, P) float32: one vector a caption, of a text encoder that pools (CLIP's, MiniLM's)."""

    width: int
    encoder: int = 0
    """Which of model.json's text encoders reads it."""
    name: str = "pooled"
    """Name of its array."""
    setting: str = "pooled_dim"
    """Key of the predictor's section that says ``width``."""
    shared_coin: str = ""
    """Coin that it shares with other conditions; empty: its own."""

    def examples(self, count: int) -> Arrays:
        """Return vectors of no caption, normally distributed."""
        return {self.name: np.random.default_rng(0).standard_normal((count, self.width), np.float32)}


@dataclass(frozen=True)
class Vector(Condition):
    """``vector`` (B, P) float32: numbers that come with a sample, such as an image's embedding; zeros are the null."""

    width: int
    dropout: float
    name: str = "vector"
    """Name of its array."""
    item = "vector"

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def null(self, count: int) -> Arrays:
        return {self.name: np.zeros((count, self.width), np.float32)}

    def examples(self, count: int) -> Arrays:
        """Return vectors of no sample, normally distributed."""
        vectors = np.random.default_rng(0).standard_normal((count, self.width), np.float32)
        return {self.name: np.concatenate([vectors[:-1], np.zeros_like(vectors[-1:])]) if self.has_null else vectors}


class Conditions(tuple[Condition, ...]):
    """All that steers a predictor, in the order in which the network takes it.

    Raises ConfigError where two have one name.
    """

    def __new__(cls, *conditions: Condition) -> Conditions:
        """Collect ``conditions``."""
        names = [name for condition in conditions for name in condition.names]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(
                f"predictor: the condition {twice[0]!r}", "is the name of two conditions", "give each a name of its own"
            )
        return super().__new__(cls, conditions)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all arrays, in the order of the network's arguments."""
        return tuple(name for condition in self for name in condition.names)

    @property
    def items(self) -> tuple[str, ...]:
        """What of a sample they are made of, each item once."""
        return tuple(dict.fromkeys(condition.item for condition in self))

    @property
    def has_null(self) -> bool:
        """Whether every one has a null value, so that the network can be guided."""
        return bool(self) and all(condition.has_null for condition in self)

    @property
    def label(self) -> ClassLabel | None:
        """The class label among them, or None."""
        return next((condition for condition in self if isinstance(condition, ClassLabel)), None)

    def null(self, count: int) -> Arrays:
        """Return the null value of each for ``count`` samples."""
        return {name: array for condition in self for name, array in condition.null(count).items()}

    def examples(self, count: int) -> Arrays:
        """Return ``count`` conditions to try a network with."""
        return {name: array for condition in self for name, array in condition.examples(count).items()}

    def coins(self) -> dict[str, int]:
        """Return the number of each coin, by its name: conditions with the same one are dropped together."""
        return {coin: number for number, coin in enumerate(dict.fromkeys(condition.coin for condition in self))}
