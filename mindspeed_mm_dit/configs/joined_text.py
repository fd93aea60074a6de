"""The outputs of three text encoders for one caption, joined as in Stable Diffusion 3 (Esser et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_mm_dit.configs.condition import PooledText, TextCondition, TextStates
from mindspeed_mm_dit.configs.text_encoder import TextEncoderConfig
from mindspeed_mm_dit.errors import ConfigError

ENCODERS = 3
"""CLIP, a larger CLIP, and T5, in the order of model.json."""
POOLING = (0, 1)
"""Indices of the encoders that pool."""


@dataclass(frozen=True)
class JoinedText(TextCondition):
    """``text`` (B, L, D) and ``pooled`` (B, P), float32.

    The states of both CLIPs are concatenated along D, then those of T5 follow along L; whichever is narrower is padded
    with zeros to width D. The pooled vectors of both CLIPs are concatenated.
    """

    length: int
    """L, for estimates."""
    width: int
    """D."""
    pooled: int
    """P."""
    encoder_dropout: float = 0.0
    """Probability that a training sample loses an encoder, whose output becomes zeros; separately for each."""
    name: str = "text"
    """Name of the states, and the dropout key of the whole caption."""

    names = ("text", "pooled")
    settings = ("joint_attention_dim", "pooled_projection_dim")

    @property
    def parts(self) -> tuple[TextStates | PooledText, ...]:
        """The states of each encoder and the pooled vectors, under separate names; their widths are not checked."""
        states = [TextStates(self.length, 0, encoder=number, name=f"text_{number}") for number in range(ENCODERS)]
        return (*states, *(PooledText(0, encoder=number, name=f"pooled_{number}") for number in POOLING))

    @property
    def published(self) -> dict[int, dict[str, Any]]:
        return {**{number: {"states": "penultimate"} for number in POOLING}, ENCODERS - 1: {"attend_padding": True}}

    def widths_of(self, encoders: Sequence[TextEncoderConfig]) -> dict[str, int | None]:
        *clips, t5 = (encoder.states_width() for encoder in encoders)
        pooled = [encoders[number].pooled_width() for number in POOLING]
        return dict(zip(self.settings, (max(sum(clips), t5), None if None in pooled else sum(filter(None, pooled)))))

    def check_encoders(self, encoders: Sequence[TextEncoderConfig]) -> None:
        """Raise ConfigError unless the widths fit the predictor, and both CLIPs have the same number of tokens."""
        super().check_encoders(encoders)
        first, second = (encoders[number].max_length for number in POOLING)
        if first != second:
            raise ConfigError(f"text_encoder[1].max_length = {second}",
                              f"must be {first}, that of the first: their states are concatenated")  # fmt: skip

    @property
    def _expected_widths(self) -> dict[str, int]:
        return dict(zip(self.settings, (self.width, self.pooled)))

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return (self.length, self.width), (self.pooled,)
