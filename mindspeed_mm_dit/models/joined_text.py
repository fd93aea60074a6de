"""Concatenates the outputs of three text encoders as Stable Diffusion 3 does (``configs/joined_text.py``)."""

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
"""Batch key of the encoder mask, (B, 3) float32: 0 for a dropped encoder, whose output becomes zeros, else 1."""


class JoinedTextCollator(CaptionCollator):
    """Tokenizes one caption of each row for all encoders, and draws which encoders are dropped."""

    def __init__(self, condition: JoinedText, condition_batch: ConditionBatch) -> None:
        super().__init__(condition, condition_batch, tokenize)

    def arrays(self, rows: np.ndarray, sample_indices: np.ndarray) -> Arrays:
        """Return ids and mask (B, L) of each encoder, or their cached outputs; with dropout also ``KEPT``."""
        arrays, seed, dropout = super().arrays(rows, sample_indices), self._inputs.seed, self._condition.encoder_dropout
        if dropout:
            dropped = [coins(seed, Stream.ENCODER_DROP, sample_indices, dropout, number) for number in range(ENCODERS)]
            arrays[KEPT] = 1 - np.stack(dropped, 1).astype(np.float32)  # (B, 3)
        return arrays


def tokenize(condition: JoinedText, captions: Sequence[str], tokenizers: Sequence[Any]) -> Arrays:
    """Return ids and mask (B, L) of each encoder for ``captions`` (B,)."""
    arrays: Arrays = {}
    for number, tokenizer in enumerate(tokenizers):
        tokens = tokenizer(captions)
        arrays |= {f"text_{number}_ids": tokens.ids, f"text_{number}_mask": tokens.mask}
    return arrays


def joined_text(condition: JoinedText, batch: Mapping[str, Tensor], text_encoders: Sequence[Any]) -> tuple[Tensor, ...]:
    """Return states (B, L, D) and pooled vectors (B, P) of a batch: encoded now, from a cache, or already joined."""
    from mindspeed_mm_dit.framework import ops

    if condition.name in batch:
        return tuple(batch[name] for name in condition.names)
    if "text_0" in batch:
        states, pooled = [batch[f"text_{n}"] for n in range(ENCODERS)], [batch[f"pooled_{n}"] for n in POOLING]
    else:
        outputs = [
            encoder.network(batch[f"text_{n}_ids"], batch[f"text_{n}_mask"]) for n, encoder in enumerate(text_encoders)
        ]
        states, pooled = [output.states for output in outputs], [outputs[n].pooled for n in POOLING]
    if KEPT in batch:
        keep = batch[KEPT]  # (B, 3)
        states = [state * keep[:, n, None, None] for n, state in enumerate(states)]  # (B, L, D) each
        pooled = [vector * keep[:, n, None] for n, vector in enumerate(pooled)]  # (B, P) each
    *clips, t5 = states
    clip_states = ops.cat(clips, 2)  # (B, L, D)
    width = max(clip_states.shape[2], t5.shape[2])
    padded = [ops.pad(state, (0, width - state.shape[2], 0, 0)) for state in (clip_states, t5)]
    return ops.cat(padded, 1), ops.cat(pooled, 1)


JOINED = ConditionKind(
    JoinedTextCollator,
    tokenize,
    unconditional=lambda condition, instead, tokenizers: tokenize(condition, [instead or ""], tokenizers),
    encode=lambda condition, batch, model: joined_text(condition, batch, model.text_encoders),
)
