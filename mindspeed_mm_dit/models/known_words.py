"""The words of a model's training captions, for text encoders without pre-training, to which others mean nothing."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.models.registry import TEXT_ENCODERS

MOST_KEPT, MOST_LISTED = 10_000, 5
"""Most words that a checkpoint stores, and that a note lists."""


def words_of(config: ModelConfig, captions: Iterable[str]) -> list[str]:
    """Return all distinct words of ``captions``; [] if an encoder is pre-trained, or for more than MOST_KEPT."""
    words: dict[str, None] = {}
    readers = [TEXT_ENCODERS[text.model_id].words for text in config.text_encoders]
    for caption in captions if all(readers) else ():
        for read in readers:
            words |= dict.fromkeys(read(caption))  # type: ignore[misc]
        if len(words) > MOST_KEPT:
            return []
    return list(words)


def note_of_words(config: ModelConfig, learned: Sequence[str], prompts: Sequence[str]) -> str:
    """Return a note on the words of ``prompts`` that are not among ``learned``; empty if there are none."""
    unknown = [word for word in words_of(config, prompts) if word not in learned] if learned else []
    if not unknown:
        return ""
    listed = ", ".join(map(repr, unknown[:MOST_LISTED])) + (" ..." if len(unknown) > MOST_LISTED else "")
    nearest = difflib.get_close_matches(unknown[0], learned, 3) or sorted(learned)[:MOST_LISTED]
    return (
        f"note: no training caption has {listed}, so this model ignores {'it' if len(unknown) == 1 else 'them'}. "
        f"It knows {len(learned)} words, such as {', '.join(nearest)}"
    )
