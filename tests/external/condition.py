"""A condition as another package brings it: an angle, as its cosine and sine; none is the middle of the circle."""

from dataclasses import dataclass

import numpy as np

from mindspeed_mm_dit.configs.condition import ClassLabel, Condition, Conditions
from mindspeed_mm_dit.data.conditions import CollatorInputs, ConditionSpec
from tests.external.predictor import ResidualConfig


@dataclass(frozen=True)
class Angle(Condition):
    """``angle`` (B, 2) float32."""

    dropout: float
    item = "angle"
    names = ("angle",)

    def unconditional(self, count: int) -> dict[str, np.ndarray]:
        return {"angle": np.zeros((count, 2), np.float32)}

    def examples(self, count: int) -> dict[str, np.ndarray]:
        return {"angle": on_circle(np.linspace(0, 6, count))}


def on_circle(angles: np.ndarray) -> np.ndarray:
    """Return the points (B, 2) float32 of angles (B,)."""
    return np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)


class AngleFeed:
    """The angles of rows, some of them dropped by a coin of their own."""

    def __init__(self, condition: Angle, fed: CollatorInputs) -> None:
        self._condition, self._fed = condition, fed

    def arrays(self, rows: np.ndarray, sample_indices: np.ndarray) -> dict[str, np.ndarray]:
        drops = self._fed.drops(sample_indices, self._condition.dropout)
        return self._condition.dropped({"angle": on_circle(self._fed.rows.items["angle"][rows])}, drops)

    def words(self, rows: np.ndarray, sample_indices: np.ndarray) -> list[tuple[str, bool]]:
        drops = self._fed.drops(sample_indices, self._condition.dropout).tolist()
        return [(f"{angle:.2f}", drop) for angle, drop in zip(self._fed.rows.items["angle"][rows].tolist(), drops)]


ANGLE = ConditionSpec(
    collator=AngleFeed,
    request_arrays=lambda condition, angles, tokenizers: {"angle": on_circle(np.asarray(angles, float))},
    unconditional=lambda condition, instead, tokenizers: condition.unconditional(1),
    encode=lambda condition, batch, encoders: (batch["angle"],),
)


@dataclass(frozen=True)
class TurnedConfig(ResidualConfig):
    """The residual predictor, steered by an angle too: it shifts the label's vector."""

    model_id: str = "turned"

    network = "tests.external.rotary:Turned"

    @property
    def conditions(self) -> Conditions:
        return Conditions(ClassLabel(self.classes, self.dropout), Angle(0.2))
