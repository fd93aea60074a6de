"""The words that a model has learned, where its text encoder knows no language: all others say nothing."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.models.registry import TEXT_ENCODERS

MOST_KEPT, MOST_TOLD = 10_000, 5
"""Most words that a checkpoint keeps, and that a note names."""


def words_of(config: ModelConfig, captions: Iterable[str]) -> list[str]:
    """Return all words of ``captions``, each once; [] where an encoder knows language, or of more than MOST_KEPT."""
    found: dict[str, None] = {}
    readers = [TEXT_ENCODERS[text.model_id].words for text in config.text_encoders]
    for caption in captions if all(readers) else ():
        for read in readers:
            found |= dict.fromkeys(read(caption))  # type: ignore[misc]
        if len(found) > MOST_KEPT:
            return []
    return list(found)


def note_of_words(config: ModelConfig, learned: Sequence[str], prompts: Sequence[str]) -> str:
    """Return a note on the words of ``prompts`` that are not among ``learned``; empty if nothing is to be noted."""
    strange = [word for word in words_of(config, prompts) if word not in learned] if learned else []
    if not strange:
        return ""
    told = ", ".join(map(repr, strange[:MOST_TOLD])) + (" ..." if len(strange) > MOST_TOLD else "")
    nearest = difflib.get_close_matches(strange[0], learned, 3) or sorted(learned)[:MOST_TOLD]
    return (
        f"note: no caption that was learned has {told}: to this model {'it says' if len(strange) == 1 else 'they say'} "
        f"nothing. It knows {len(learned)} words, such as {', '.join(nearest)}"
    )
