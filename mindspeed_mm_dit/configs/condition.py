"""What steers a prediction: its arrays in a batch, what becomes of it where it is dropped, and what guidance asks for.

A batch is source arrays, the arrays of a condition, and what the objective draws. The network is called as
``predictor(x_t, t, *condition)``, in the order of ``names``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mindspeed_mm_dit.errors import ConfigError

Arrays = dict[str, np.ndarray]


class Condition(ABC):
    """Base of the kinds of condition; a predictor's config says which it takes."""

    names: tuple[str, ...]
    """Of its arrays in a batch, each (B, ...)."""
    dropout: float
    """Probability that a training sample gets the null condition, which guidance needs (Ho & Salimans 2022)."""

    @property
    def has_null(self) -> bool:
        """Whether a network trained with it knows the null condition, so that it can be guided."""
        return self.dropout > 0

    @abstractmethod
    def null(self, count: int) -> Arrays:
        """Return the null condition of ``count`` samples."""

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
    names = ("labels",)

    def null(self, count: int) -> Arrays:
        """Return ``count`` labels of the null class."""
        return {"labels": np.full(count, self.num_classes, np.int64)}

    def examples(self, count: int) -> Arrays:
        """Return labels spread over the classes."""
        labels = np.arange(count) * 7 % self.num_classes
        if self.has_null:
            labels[-1] = self.num_classes
        return {"labels": labels}


@dataclass(frozen=True)
class TextStates(Condition):
    """``text`` (B, L, D) float32: the states of a text encoder, L tokens of width D.

    Captions are dropped where they are read, and the null condition is the encoding of the empty one: a text encoder,
    or features that were made with it, has it.
    """

    length: int
    width: int
    names = ("text",)
    dropout = 0.0
    has_null = True

    def null(self, count: int) -> Arrays:
        """Raise ConfigError: without a text encoder nobody knows it."""
        raise ConfigError("predictor: its text", "has a null value that a text encoder alone can tell")

    def examples(self, count: int) -> Arrays:
        """Return states of no caption, normally distributed."""
        states = np.random.default_rng(0).standard_normal((count, self.length, self.width), np.float32)
        return {"text": states}
