"""``words``.

A text encoder without weights. A word is a random vector, the same in every run; unknown words are reported.
"""

from __future__ import annotations

import difflib
import html
import re
import unicodedata
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.configs.text_encoder import WordsConfig
from mindspeed_mm_dit.data.captions import Tokens, caption_problems
from mindspeed_mm_dit.models.registry import TEXT_ENCODERS
from mindspeed_mm_dit.models.text_encoder import EncodedText, TextEncoderSpec

MAX_SAVED_WORDS, MAX_LISTED_WORDS = 10_000, 5
"""Most words that a checkpoint stores, and that a note lists."""


def known_words_of(config: ModelConfig, captions: Iterable[str]) -> list[str]:
    """Return all distinct words of ``captions``; [] if an encoder is pre-trained, or for more than MAX_SAVED_WORDS."""
    words: dict[str, None] = {}
    readers = [TEXT_ENCODERS[text.model_id].words for text in config.text_encoders]
    for caption in captions if all(readers) else ():
        for read in readers:
            words |= dict.fromkeys(read(caption))  # type: ignore[misc]
        if len(words) > MAX_SAVED_WORDS:
            return []
    return list(words)


def note_of_words(config: ModelConfig, learned: Sequence[str], prompts: Sequence[str]) -> str:
    """Return a note on the words of ``prompts`` that are not among ``learned``; empty if there are none."""
    unknown = [word for word in known_words_of(config, prompts) if word not in learned] if learned else []
    if not unknown:
        return ""
    listed = ", ".join(map(repr, unknown[:MAX_LISTED_WORDS])) + (" ..." if len(unknown) > MAX_LISTED_WORDS else "")
    nearest = difflib.get_close_matches(unknown[0], learned, 3) or sorted(learned)[:MAX_LISTED_WORDS]
    return (
        f"note: no training caption has {listed}, so this model ignores {'it' if len(unknown) == 1 else 'them'}. "
        f"It knows {len(learned)} words, such as {', '.join(nearest)}"
    )


_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+")
"""A run of letters and digits; of Chinese and Japanese, which have no spaces, one character."""
_TABLES, _ROWS = 3, 1024
"""A word is the sum of one row of each table, so 2^30 words differ."""
PREVIOUS_WORD_WEIGHT = 0.5
"""Weight of the previous word in a word's state, which tells "red car, blue sky" from "blue car, red sky"."""


class WordsTokenizer:
    """Words in small letters, each with a hash as its id, and 0 for the end; safe to call from several threads."""

    def __init__(self, config: WordsConfig) -> None:
        self.config = config

    def lengths(self, captions: Iterable[str]) -> list[int]:
        """Return the number of tokens of each caption, its end included, without truncation."""
        return [len(_words(caption)) + 1 for caption in captions]

    def __call__(self, captions: Sequence[str]) -> Tokens:
        """Return ids and mask of captions (B,), padded or truncated to ``max_length``."""
        ids, mask = np.zeros((2, len(captions), self.config.max_length), np.int64)
        for row, caption in enumerate(captions):
            words = _words(caption)[: self.config.max_length - 1]
            ids[row, : len(words)] = [zlib.crc32(word.encode()) % _ROWS**_TABLES for word in words]
            mask[row, : len(words) + 1] = 1
        return Tokens(ids, mask)


def has_words(captions: Sequence[str]) -> list[str]:
    """Return the problem of each of ``captions``, as ``caption_problems`` does: that it has no words."""
    return caption_problems(WordsTokenizer(WordsConfig(truncate=True)), captions)


def _words(caption: str) -> list[str]:
    return _WORD.findall(unicodedata.normalize("NFKC", html.unescape(caption)).casefold())


def _build(config: WordsConfig) -> Callable[[Any, Any], EncodedText]:
    from mindspeed_mm_dit.framework import ops

    tables = np.random.default_rng(0).standard_normal((_TABLES, _ROWS, config.width), np.float32) / _TABLES**0.5

    def network(ids: Any, mask: Any) -> EncodedText:
        """Encode ids and mask (B, L) int64: the mean of a caption's states, of about length 1 an entry, is pooled."""
        rows, real = ops.numpy(ids), ops.numpy(mask)[:, :, None].astype(np.float32)
        states = sum(table[rows // _ROWS**n % _ROWS] for n, table in enumerate(tables)) * real  # (B, L, D)
        before = np.roll(np.pad(states, ((0, 0), (1, 0), (0, 0)))[:, :-1], 1, axis=2)
        states = (states + PREVIOUS_WORD_WEIGHT * before) * real
        pooled = states.sum(1) / real.sum(1) ** 0.5  # (B, D)
        return EncodedText(ops.tensor(states), mask, ops.tensor(pooled))

    return network


WORDS = TextEncoderSpec(WordsConfig, WordsTokenizer, _build, words=_words)
