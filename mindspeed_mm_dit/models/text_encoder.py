"""Text encoders: a tokenizer and a frozen network that belong together. Never part of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mindspeed_mm_dit.configs.condition import ENCODERS, POOLING, JoinedText
from mindspeed_mm_dit.configs.text_encoder import TextEncoderConfig, TransformersTextConfig
from mindspeed_mm_dit.data.captions import CaptionTokenizer, Tokenizer, caption_problems
from mindspeed_mm_dit.data.conditions import Arrays, CaptionCollator, CollatorInputs, ConditionSpec
from mindspeed_mm_dit.data.order import Stream, bernoulli
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.models.pretrained import check_weights

Tensor = Any

MAX_SPARE_ROWS = 512
"""An encoder's embedding table has as many rows as its tokenizer has ids, or fewer than this more."""


class EncodedText(NamedTuple):
    """A text encoder's output for captions."""

    states: Tensor
    """(B, L, D) float32: one per token, padding included; L is ``max_length``."""
    mask: Tensor
    """(B, L) int64: 1 for a token, 0 for padding."""
    pooled: Tensor | None = None
    """(B, P) float32: one vector per caption, if the encoder has it."""


@dataclass(frozen=True)
class TextEncoderSpec:
    """A kind of text encoder, selected by ``model_id`` in section ``text_encoder`` of model.json."""

    config: type[TextEncoderConfig]
    """Frozen dataclass of the section."""
    open_tokenizer: Callable[[Any], Tokenizer]
    """(config) -> its tokenizer; raises a UserError if it belongs to another encoder. Reads no weights."""
    build: Callable[[Any], Callable[[Tensor, Tensor], EncodedText]]
    """(config) -> the network, (ids (B, L), mask (B, L)) -> EncodedText; imports the framework only when called."""
    check_files: Callable[[Any], None] = lambda config: None
    """(config): raise a UserError if weights are missing or cut short; called before any device work."""
    words: Callable[[str], Sequence[str]] | None = None
    """(caption) -> its words, if unknown words mean nothing to the encoder; None if the encoder is pre-trained."""


@dataclass(frozen=True)
class TextEncoder:
    """A tokenizer and the network that reads its ids."""

    tokenizer: Tokenizer
    """Captions to ids and mask."""
    network: Callable[[Tensor, Tensor], EncodedText]
    """(ids (B, L), mask (B, L)) int64 -> encoded captions."""

    def encode(self, captions: Sequence[str]) -> EncodedText:
        """Encode captions (B,)."""
        from mindspeed_mm_dit.framework import ops

        tokens = self.tokenizer(captions)
        return self.network(ops.tensor(tokens.ids), ops.tensor(tokens.mask))


def check_captions(tokenizer: Tokenizer, captions: Sequence[str], flag: str) -> None:
    """Raise ConfigError naming ``flag`` if a caption is too long for the encoder or has no words."""
    for problem in caption_problems(tokenizer, captions):
        if problem:
            raise ConfigError(f"{flag} {problem}. Write {'it in words' if 'no words' in problem else 'it shorter'}.")


def check_files(config: TransformersTextConfig) -> None:
    """Raise CheckpointError if the weights in a transformers folder are missing, cut short or of another kind."""
    check_weights("text_encoder.from_pretrained", config.folder)


def folder_tokenizer(
    config: TransformersTextConfig, model_type: str, hint: str, ids: Sequence[str], positions: str
) -> CaptionTokenizer:
    """Return the tokenizer of an encoder in a transformers folder, after checking that both belong together.

    model_type: the encoder's required model_type in config.json; hint: a sentence on where to find one; ids: the
    special ids that both must have in common; positions: the key of config.json for the longest text, if there is one.
    Raises ConfigError if they do not belong together; reads no weights.
    """
    encoder = config.read()
    if encoder.get("model_type") != model_type:
        raise ConfigError(
            f"text_encoder.from_pretrained = {config.config_file} is of a {encoder.get('model_type')!r}, not of a "
            f"{model_type!r}. {hint}"
        )
    if positions and config.max_length > config.number(positions):
        most = config.number(positions)
        raise ConfigError(
            f"text_encoder.max_length = {config.max_length} is more than the encoder reads: its {positions} is {most}. "
            f"Use at most {most}."
        )
    tokenizer = CaptionTokenizer(config)
    rows, known = encoder.get("vocab_size"), tokenizer.vocabulary_size
    if type(rows) is not int or not known <= rows < known + MAX_SPARE_ROWS:
        raise _mismatch(config, f"the encoder has vocab_size = {rows}, but the tokenizer {known} ids")
    for name in ids:
        if encoder.get(name) != tokenizer.special_ids[name]:
            theirs = tokenizer.special_ids[name]
            raise _mismatch(config, f"the encoder has {name} = {encoder.get(name)}, but the tokenizer {theirs}")
    tokenizer.check_template()
    return tokenizer


def _mismatch(config: TransformersTextConfig, difference: str) -> ConfigError:
    return ConfigError(
        f"text_encoder.tokenizer = {config.tokenizer_folder} does not belong to the encoder in "
        f"{config.from_pretrained}: {difference}. Name the tokenizer that came with the encoder."
    )


TEXT_KEPT = "text_kept"
"""Batch key of the encoder mask, (B, 3) float32: 0 for a dropped encoder, whose output becomes zeros, else 1."""


class JoinedTextCollator(CaptionCollator):
    """Tokenizes one caption of each row for all encoders, and draws which encoders are dropped."""

    def __init__(self, condition: JoinedText, condition_batch: CollatorInputs) -> None:
        super().__init__(condition, condition_batch, tokenize)

    def arrays(self, rows: np.ndarray, sample_indices: np.ndarray) -> Arrays:
        """Return ids and mask (B, L) of each encoder, or their cached outputs; with dropout also ``TEXT_KEPT``."""
        arrays, seed, dropout = super().arrays(rows, sample_indices), self._inputs.seed, self._condition.encoder_dropout
        if dropout:
            dropped = [
                bernoulli(seed, Stream.ENCODER_DROP, sample_indices, dropout, number) for number in range(ENCODERS)
            ]
            arrays[TEXT_KEPT] = 1 - np.stack(dropped, 1).astype(np.float32)  # (B, 3)
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
    if TEXT_KEPT in batch:
        keep = batch[TEXT_KEPT]  # (B, 3)
        states = [state * keep[:, n, None, None] for n, state in enumerate(states)]  # (B, L, D) each
        pooled = [vector * keep[:, n, None] for n, vector in enumerate(pooled)]  # (B, P) each
    *clips, t5 = states
    clip_states = ops.cat(clips, 2)  # (B, L, D)
    width = max(clip_states.shape[2], t5.shape[2])
    padded = [ops.pad(state, (0, width - state.shape[2], 0, 0)) for state in (clip_states, t5)]
    return ops.cat(padded, 1), ops.cat(pooled, 1)


JOINED = ConditionSpec(
    JoinedTextCollator,
    tokenize,
    unconditional=lambda condition, instead, tokenizers: tokenize(condition, [instead or ""], tokenizers),
    encode=lambda condition, batch, model: joined_text(condition, batch, model.text_encoders),
)
