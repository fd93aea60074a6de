"""A caption that three text encoders read, whose outputs are joined on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.joined_text import ENCODERS, JoinedText
from mindspeed_mm_dit.data.conditions.contract import Arrays
from mindspeed_mm_dit.data.conditions.text import CaptionFeed
from mindspeed_mm_dit.data.draws import Stream, coins

KEPT = "text_kept"
"""Name of the encoders that each sample keeps, (B, 3) float32: 1, or 0 for one whose output becomes zeros."""


class JoinedFeed(CaptionFeed):
    """Feeds one caption of each row to all encoders, and says which of them it loses."""

    def arrays(self, rows: np.ndarray, sample_indices: np.ndarray) -> Arrays:
        """Return ids and mask (B, L) of each encoder, or their cached outputs; with dropout also ``KEPT``."""
        numbers, cached = self._numbers(rows, sample_indices), self._fed.rows.cached
        found: Arrays = {}
        if self._fed.cache is not None and cached is not None:
            for part in self._condition.parts:
                found |= self._fed.cache.read_text(part.name, cached[rows], numbers)
        else:
            found = asked(self._condition, self._chosen(rows, numbers), self._fed.tokenizers)
        if self._condition.encoder_dropout:
            seed, dropout = self._fed.seed, self._condition.encoder_dropout
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


def null(condition: JoinedText, instead: str | None, tokenizers: Sequence[Any]) -> Arrays:
    """Return the same for one empty caption, or for what stands ``instead`` of it."""
    return asked(condition, [instead or ""], tokenizers)
