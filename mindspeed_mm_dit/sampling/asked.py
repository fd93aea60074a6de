"""What samples are asked for: a value of each item that steers the model, for each of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.condition import Conditions
from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.errors import ConfigError


@dataclass(frozen=True)
class Asked:
    """Some samples, numbered from ``first_number`` on; the noise of a sample depends on its number."""

    values: Mapping[str, Sequence[Any]]
    """By item, one for each sample: "label" whole numbers, "caption" strings, "vector" (P,) each."""
    instead: Mapping[str, Any] = field(default_factory=dict)
    """What guidance leads away from, by item; where there is none, from the null condition."""
    first_number: int = 0

    def __post_init__(self) -> None:
        assert len(set(map(len, self.values.values()))) == 1, "every sample has every value"

    def __len__(self) -> int:
        return len(next(iter(self.values.values())))

    def at(self, numbers: np.ndarray) -> Asked:
        """Return the samples ``numbers`` (n,) in a row of this one's."""
        values = {item: [own[number] for number in numbers.tolist()] for item, own in self.values.items()}
        return dataclasses.replace(self, values=values, first_number=self.first_number + int(numbers[0]))

    def each(self, times: int) -> Asked:
        """Return ``times`` samples of each value."""
        return self.at(np.repeat(np.arange(len(self)), times)) if times > 1 else self

    @property
    def labels(self) -> np.ndarray | None:
        """(N,) int64; None where no labels are asked for."""
        return np.array(self.values["label"], np.int64) if "label" in self.values else None

    def titles(self, classes: Sequence[str] = ()) -> list[str]:
        """Return what each sample is to show, in words; ``classes``: name of each label, where they are known."""
        words = []
        if "label" in self.values:
            words.append([classes[n] if n < len(classes) else str(n) for n in self.values["label"]])
        if "caption" in self.values:
            words.append(list(self.values["caption"]))
        return [", ".join(own) for own in zip(*words)] if words else [str(n) for n in range(len(self))]


def check_asked(asked: Asked, config: ModelConfig) -> None:
    """Raise ConfigError for a label that is no class of the model, or an item that nobody asked for."""
    conditions: Conditions = config.predictor.conditions
    missing = [item for item in conditions.items if item not in asked.values]
    if missing:
        raise ConfigError(f"samples without a {missing[0]}", "the model is steered by it", f"ask for a {missing[0]}")
    if conditions.label is None:
        return
    classes = conditions.label.num_classes
    for label in asked.values["label"]:
        if not 0 <= label < classes:
            raise ConfigError(
                f"--classes: {label}", f"is outside 0 ... {classes - 1} (predictor.num_classes = {classes})"
            )
