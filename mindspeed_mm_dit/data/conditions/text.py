"""Captions in a batch: tokens that a text encoder reads on the device, or its cached output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.condition import OneText, TextStates
from mindspeed_mm_dit.data.conditions.contract import Arrays, ConditionBatch, ConditionKind
from mindspeed_mm_dit.data.draws import Stream, uniforms

NO_CAPTION = -1
"""Number of the empty caption."""


class CaptionCollator:
    """Adds one caption of each row, chosen at random each time; some are replaced by the empty caption.

    All text conditions of a sample get the same caption.
    """

    def __init__(
        self, condition: Any, inputs: ConditionBatch, request_arrays: Callable[..., Arrays] | None = None
    ) -> None:
        """``request_arrays``: as in ``ConditionKind``."""
        self._condition, self._inputs, self._request_arrays = condition, inputs, request_arrays or _caption_arrays
        self._num_captions = np.array([len(captions) for captions in inputs.rows.captions], np.int64)

    def arrays(self, rows: np.ndarray, sample_indices: np.ndarray) -> Arrays:
        """Return ids and mask (B, L) int64 of the captions, or the encoder's cached output for them."""
        numbers, cached = self._numbers(rows, sample_indices), self._inputs.rows.cached
        if self._inputs.cache is not None and cached is not None:
            texts = [self._inputs.cache.read_text(part.name, cached[rows], numbers) for part in self._condition.parts]
            return dict(pair for arrays in texts for pair in arrays.items())
        return self._request_arrays(self._condition, self._chosen(rows, numbers), self._inputs.tokenizers)

    def words(self, rows: np.ndarray, sample_indices: np.ndarray) -> list[tuple[str, bool]]:
        """Return the captions; for a dropped one, the first caption of its row."""
        captions = (self._inputs.rows.captions[row] for row in rows.tolist())
        numbers = self._numbers(rows, sample_indices).tolist()
        return [(texts[max(number, 0)], number == NO_CAPTION) for texts, number in zip(captions, numbers)]

    def _chosen(self, rows: np.ndarray, numbers: np.ndarray) -> list[str]:
        """Return the captions of ``numbers`` (B,); a dropped one is empty."""
        captions = (self._inputs.rows.captions[row] for row in rows.tolist())
        return ["" if n == NO_CAPTION else texts[n] for texts, n in zip(captions, numbers.tolist())]

    def _numbers(self, rows: np.ndarray, sample_indices: np.ndarray) -> np.ndarray:
        """Return which caption of its row each sample index gets, (B,) int64; NO_CAPTION if it is dropped."""
        dropped = self._inputs.drops(sample_indices, self._inputs.caption_dropout_prob)
        chosen = uniforms(self._inputs.seed, Stream.CAPTION, sample_indices) * self._num_captions[rows]
        return np.where(dropped, NO_CAPTION, chosen.astype(np.int64))


def _caption_arrays(condition: OneText, captions: Sequence[str], tokenizers: Sequence[Any]) -> Arrays:
    tokens = tokenizers[condition.encoder](captions)
    ids, mask = _token_names(condition)
    return {ids: tokens.ids, mask: tokens.mask}


def _unconditional(condition: OneText, instead: str | None, tokenizers: Sequence[Any]) -> Arrays:
    return _caption_arrays(condition, [instead or ""], tokenizers)


def _token_names(condition: OneText) -> tuple[str, str]:
    """Return the names of ids and mask in a batch."""
    stem = "caption" if condition.name == "text" else condition.name
    return f"{stem}_ids", f"{stem}_mask"


def _encode(condition: OneText, batch: Mapping[str, Any], model: Any) -> tuple[Any, ...]:
    ids, mask = _token_names(condition)
    if ids not in batch:
        return (batch[condition.name],)
    encoded = model.text_encoders[condition.encoder].network(batch[ids], batch[mask])
    return (encoded.states if isinstance(condition, TextStates) else encoded.pooled,)


TEXT = ConditionKind(CaptionCollator, _caption_arrays, _unconditional, _encode)
