"""Joins what three text encoders make of a caption, as Stable Diffusion 3 takes it (``configs/joined_text.py``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.joined_text import ENCODERS, POOLING, JoinedText
from mindspeed_mm_dit.data.conditions.contract import Arrays, ConditionBatch, ConditionKind
from mindspeed_mm_dit.data.conditions.text import CaptionCollator
from mindspeed_mm_dit.data.draws import Stream, coins

Tensor = Any
KEPT = "text_kept"
"""Name of the encoders that each sample keeps, (B, 3) float32: 1, or 0 for one whose output becomes zeros."""


class JoinedTextCollator(CaptionCollator):
    """Feeds one caption of each row to all encoders, and says which of them it loses."""

    def __init__(self, condition: JoinedText, fed: ConditionBatch) -> None:
        super().__init__(condition, fed, asked)

    def arrays(self, rows: np.ndarray, sample_indices: np.ndarray) -> Arrays:
        """Return ids and mask (B, L) of each encoder, or their cached outputs; with dropout also ``KEPT``."""
        found, seed, dropout = super().arrays(rows, sample_indices), self._inputs.seed, self._condition.encoder_dropout
        if dropout:
            lost = [coins(seed, Stream.ENCODER_DROP, sample_indices, dropout, number) for number in range(ENCODERS)]
            found[KEPT] = 1 - np.stack(lost, 1).astype(np.float32)  # (B, 3)
        return found


def asked(condition: JoinedText, captions: Sequence[str], tokenizers: Sequence[Any]) -> Arrays:
    """Return ids and mask (B, L) of each encoder for ``captions`` (B,)."""
    found: Arrays = {}
    for number, tokenizer in enumerate(tokenizers):
        tokens = tokenizer(captions)
        found |= {f"text_{number}_ids": tokens.ids, f"text_{number}_mask": tokens.mask}
    return found


def joined_text(condition: JoinedText, batch: Mapping[str, Tensor], text_encoders: Sequence[Any]) -> tuple[Tensor, ...]:
    """Return states (B, L, D) and pooled vectors (B, P) of a batch, encoded now, from a cache, or as they are in it."""
    from mindspeed_mm_dit.framework import ops

    if condition.name in batch:
        return tuple(batch[name] for name in condition.names)
    if "text_0" in batch:
        states, pooled = [batch[f"text_{n}"] for n in range(ENCODERS)], [batch[f"pooled_{n}"] for n in POOLING]
    else:
        read = [own.network(batch[f"text_{n}_ids"], batch[f"text_{n}_mask"]) for n, own in enumerate(text_encoders)]
        states, pooled = [own.states for own in read], [read[n].pooled for n in POOLING]
    if KEPT in batch:
        kept = batch[KEPT]  # (B, 3)
        states = [own * kept[:, n, None, None] for n, own in enumerate(states)]  # (B, L, D) each
        pooled = [own * kept[:, n, None] for n, own in enumerate(pooled)]  # (B, P) each
    *clips, t5 = states
    both = ops.cat(clips, 2)  # (B, L, D)
    width = max(both.shape[2], t5.shape[2])
    filled = [ops.pad(own, (0, width - own.shape[2], 0, 0)) for own in (both, t5)]
    return ops.cat(filled, 1), ops.cat(pooled, 1)


JOINED = ConditionKind(
    JoinedTextCollator,
    asked,
    unconditional=lambda condition, instead, tokenizers: asked(condition, [instead or ""], tokenizers),
    encode=lambda condition, batch, model: joined_text(condition, batch, model.text_encoders),
)
