"""Conditions: from a sample's items to the arrays of a batch, and from these to the inputs of a network.

A kind of condition is one record, found by the condition's class. Class labels and vectors need no encoder. A caption
becomes tokens that a text encoder reads on the device, or its cached output. The frames that a clip begins and ends
with come from the clip in training, and are images that a user names in sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mindspeed_mm_dit.configs.condition import (
    Condition,
    Conditions,
    FirstFrame,
    ImageCondition,
    SingleEncoderText,
    TextStates,
    Vector,
)
from mindspeed_mm_dit.data.order import Stream, bernoulli, uniforms
from mindspeed_mm_dit.data.sources import Rows
from mindspeed_mm_dit.errors import ConfigError, DataError
from mindspeed_mm_dit.registry import Registry

Arrays = dict[str, np.ndarray]
Tensor = Any

NO_CAPTION = -1
"""Number of the empty caption."""
FRAMES_KEPT = "frames_kept"
"""Name of the mask of samples that keep their frames, (B,) float32: 1, or 0 for one trained on its text alone."""
IMAGES = ("first_image", "last_image")
"""Names of the arrays of images, (B, 3 or 1, H, W) uint8, in a batch of requested samples."""


@dataclass(frozen=True)
class CollatorInputs:
    """The inputs from which a condition's training arrays are made."""

    rows: Rows
    seed: int
    dropout_key: int
    """Key of its dropout draws, among those of the predictor's conditions."""
    caption_dropout_prob: float
    """From data.json."""
    tokenizers: Sequence[Any]
    """One per text encoder of model.json; empty if a cache has the encoded text."""
    cache: Any = None
    """The cache of the rows; None without one."""

    def drops(self, sample_indices: np.ndarray, probability: float) -> np.ndarray:
        """Return which of ``sample_indices`` (B,) lose the condition, (B,) bool."""
        return bernoulli(self.seed, Stream.LABEL_DROP, sample_indices, probability, self.dropout_key)


class ConditionCollator(Protocol):
    """Makes the arrays of a condition for a training batch; called from several threads."""

    def arrays(self, rows: np.ndarray, sample_indices: np.ndarray) -> Arrays:
        """Return the arrays for ``sample_indices`` (B,), whose rows are ``rows`` (B,)."""

    def words(self, rows: np.ndarray, sample_indices: np.ndarray) -> list[tuple[str, bool]]:
        """Return a description of each sample's condition, and whether it is dropped."""


@dataclass(frozen=True)
class ConditionSpec:
    """A kind of condition."""

    collator: Callable[[Any, CollatorInputs], ConditionCollator]
    """(condition, inputs) -> the collator that makes its arrays of a training batch."""
    request_arrays: Callable[[Any, Any, Sequence[Any]], Arrays]
    """(condition, a value per sample, tokenizers) -> the same arrays for requested samples."""
    unconditional: Callable[[Any, Any, Sequence[Any]], Arrays]
    """(condition, negative prompt or None, tokenizers) -> the same arrays for one unconditional sample."""
    encode: Callable[[Any, Mapping[str, Tensor], Any], tuple[Tensor, ...]]
    """(condition, tensors of a batch, the composite) -> the network's inputs, in the order of its names."""


CONDITIONS = Registry[ConditionSpec]("condition")
"""By the qualified name of a condition's class."""


def register_condition(condition: type[Condition], kind: ConditionSpec) -> None:
    """Add a kind of condition; raises ConfigError if its class is already registered with another kind."""
    CONDITIONS[_qualified_name(condition)] = kind


def kind_of(condition: Condition) -> ConditionSpec:
    """Return the kind of a condition."""
    return CONDITIONS[_qualified_name(type(condition))]


def _qualified_name(condition: type[Condition]) -> str:
    return f"{condition.__module__}.{condition.__qualname__}"


def request_arrays(conditions: Conditions, values: Mapping[str, Any], tokenizers: Sequence[Any]) -> Arrays:
    """Return the arrays for requested samples; ``values``: by item, one per sample."""
    none, arrays = [None] * len(next(iter(values.values()))), dict[str, np.ndarray]()
    for condition in conditions:
        arrays |= kind_of(condition).request_arrays(condition, values.get(condition.item, none), tokenizers)
    return arrays


def unconditional_arrays(conditions: Conditions, instead: Mapping[str, Any], tokenizers: Sequence[Any]) -> Arrays:
    """Return the arrays for one unconditional sample; ``instead``: negative prompts of guidance, by item."""
    arrays = dict[str, np.ndarray]()
    for condition in conditions:
        arrays |= kind_of(condition).unconditional(condition, instead.get(condition.item), tokenizers)
    return arrays


def encode_conditions(conditions: Conditions, batch: Mapping[str, Any], model: Any) -> tuple[Any, ...]:
    """Return the network's inputs in the order of ``conditions.names``, from a batch and the encoders of ``model``."""
    return tuple(tensor for condition in conditions for tensor in kind_of(condition).encode(condition, batch, model))


# --- class labels and vectors -----------------------------------------------------------------------------------------


class PlainCollator:
    """Adds the values of rows, some of them replaced by the unconditional value."""

    dtype: type = np.int64

    def __init__(self, condition: Condition, inputs: CollatorInputs) -> None:
        self._condition, self._inputs = condition, inputs
        self._values = inputs.rows.items[condition.item]

    def arrays(self, rows: np.ndarray, sample_indices: np.ndarray) -> Arrays:
        arrays: Arrays = {self._condition.names[0]: np.asarray(self._values[rows], self.dtype)}
        return self._condition.dropped(arrays, self._drops(sample_indices))

    def words(self, rows: np.ndarray, sample_indices: np.ndarray) -> list[tuple[str, bool]]:
        names = [self._inputs.rows.classes[label] for label in self._values[rows].tolist()]
        return list(zip(names, self._drops(sample_indices).tolist()))

    def _drops(self, sample_indices: np.ndarray) -> np.ndarray:
        return self._inputs.drops(sample_indices, self._condition.dropout)


class VectorCollator(PlainCollator):
    """The same for vectors.

    Raises ConfigError if their width is not the one the predictor takes, DataError if one is not finite.
    """

    dtype = np.float32

    def __init__(self, condition: Vector, inputs: CollatorInputs) -> None:
        super().__init__(condition, inputs)
        if self._values.shape[1:] != (condition.width,):
            raise ConfigError(
                f"The predictor takes {condition.name} of width {condition.width}, but the vectors of the samples have "
                f"the shape {self._values.shape[1:]}. Make the two agree."
            )
        bad = ~np.isfinite(self._values).all(1)
        if bad.any():
            raise DataError(f"{inputs.rows.paths[int(bad.argmax())]} has a vector that is not finite. Make it again.")

    def words(self, rows: np.ndarray, sample_indices: np.ndarray) -> list[tuple[str, bool]]:
        return [("a vector", drop) for drop in self._drops(sample_indices).tolist()]


def _plain_kind(collator: type[PlainCollator]) -> ConditionSpec:
    return ConditionSpec(
        collator,
        request_arrays=lambda condition, values, tokenizers: {condition.names[0]: np.asarray(values, collator.dtype)},
        unconditional=lambda condition, instead, tokenizers: condition.unconditional(1),
        encode=lambda condition, batch, encoders: (batch[condition.names[0]],),
    )


LABEL, VECTOR = _plain_kind(PlainCollator), _plain_kind(VectorCollator)


# --- captions ---------------------------------------------------------------------------------------------------------


class CaptionCollator:
    """Adds one caption of each row, chosen at random each time; some are replaced by the empty caption.

    All text conditions of a sample get the same caption.
    """

    def __init__(
        self, condition: Any, inputs: CollatorInputs, request_arrays: Callable[..., Arrays] | None = None
    ) -> None:
        """``request_arrays``: as in ``ConditionSpec``."""
        self._condition, self._inputs, self._request_arrays = condition, inputs, request_arrays or _token_arrays
        self._num_captions = np.array([len(captions) for captions in inputs.rows.captions], np.int64)

    def arrays(self, rows: np.ndarray, sample_indices: np.ndarray) -> Arrays:
        """Return ids and mask (B, L) int64 of the captions, or the encoder's cached output for them."""
        numbers, cached = self._numbers(rows, sample_indices), self._inputs.rows.cached
        if self._inputs.cache is not None and cached is not None:
            texts = [self._inputs.cache.read_text(part.name, cached[rows], numbers) for part in self._condition.parts]
            return dict(pair for arrays in texts for pair in arrays.items())
        captions = [self._inputs.rows.captions[row] for row in rows.tolist()]
        chosen = ["" if n == NO_CAPTION else texts[n] for texts, n in zip(captions, numbers.tolist())]
        return self._request_arrays(self._condition, chosen, self._inputs.tokenizers)

    def words(self, rows: np.ndarray, sample_indices: np.ndarray) -> list[tuple[str, bool]]:
        """Return the captions; for a dropped one, the first caption of its row."""
        captions = [self._inputs.rows.captions[row] for row in rows.tolist()]
        numbers = self._numbers(rows, sample_indices).tolist()
        return [(texts[max(number, 0)], number == NO_CAPTION) for texts, number in zip(captions, numbers)]

    def _numbers(self, rows: np.ndarray, sample_indices: np.ndarray) -> np.ndarray:
        """Return which caption of its row each sample index gets, (B,) int64; NO_CAPTION if it is dropped."""
        dropped = self._inputs.drops(sample_indices, self._inputs.caption_dropout_prob)
        chosen = uniforms(self._inputs.seed, Stream.CAPTION, sample_indices) * self._num_captions[rows]
        return np.where(dropped, NO_CAPTION, chosen.astype(np.int64))


def _token_arrays(condition: SingleEncoderText, captions: Sequence[str], tokenizers: Sequence[Any]) -> Arrays:
    tokens = tokenizers[condition.encoder](captions)
    ids, mask = _token_names(condition)
    return {ids: tokens.ids, mask: tokens.mask}


def _token_names(condition: SingleEncoderText) -> tuple[str, str]:
    """Return the names of ids and mask in a batch."""
    stem = "caption" if condition.name == "text" else condition.name
    return f"{stem}_ids", f"{stem}_mask"


def _encode_text(condition: SingleEncoderText, batch: Mapping[str, Any], model: Any) -> tuple[Any, ...]:
    ids, mask = _token_names(condition)
    if ids not in batch:
        return (batch[condition.name],)
    output = model.text_encoders[condition.encoder].network(batch[ids], batch[mask])
    return (output.states if isinstance(condition, TextStates) else output.pooled,)


TEXT = ConditionSpec(
    CaptionCollator,
    _token_arrays,
    lambda condition, instead, tokenizers: _token_arrays(condition, [instead or ""], tokenizers),
    _encode_text,
)


# --- the frames that a clip begins and ends with ----------------------------------------------------------------------


class FramesCollator:
    """Adds no frames: they come with the clips of the batch, and are encoded from there."""

    def __init__(self, condition: ImageCondition, inputs: CollatorInputs) -> None:
        self._words = "its first frame" if isinstance(condition, FirstFrame) else "CLIP's features of it"
        self._dropout, self._inputs = condition.dropout, inputs

    def arrays(self, rows: np.ndarray, sample_indices: np.ndarray) -> Arrays:
        """Return ``FRAMES_KEPT``, with dropout."""
        return {FRAMES_KEPT: 1 - self._drops(sample_indices).astype(np.float32)} if self._dropout else {}

    def words(self, rows: np.ndarray, sample_indices: np.ndarray) -> list[tuple[str, bool]]:
        """Return the name of each clip's condition, and whether it is dropped."""
        return [(self._words, dropped) for dropped in self._drops(sample_indices).tolist()]

    def _drops(self, sample_indices: np.ndarray) -> np.ndarray:
        return self._inputs.drops(sample_indices, self._dropout)


def initial_images(read: Arrays, with_last: bool) -> Arrays:
    """Return the initial images of the one sample that was ``read``, by name, or what a cache has of them."""
    pixels = read.get("pixels")
    clip_images = {} if pixels is None else dict(zip(IMAGES, (pixels[:, :, 0], pixels[:, :, -1])[: 1 + with_last]))
    names = (*IMAGES, "frame_mean", "image_embeds")
    arrays = clip_images | {name: array for name, array in read.items() if name in names}
    return {name: array[0] for name, array in arrays.items()}


def _image_arrays(condition: ImageCondition, values: Sequence[Any], tokenizers: Sequence[Any]) -> Arrays:
    """Return images by name, or for samples that begin with none the network's input, zeros."""
    if isinstance(values[0], Mapping):
        return {name: np.stack([value[name] for value in values]) for name in values[0]}
    if values[0] is None:
        return {name: np.repeat(array, len(values), 0) for name, array in condition.meta_arrays().items()}
    return {name: np.stack(images) for name, images in zip(IMAGES, zip(*values))}


def _frames_kind(encode: Callable[..., tuple[Tensor, ...]]) -> ConditionSpec:
    return ConditionSpec(FramesCollator, _image_arrays, lambda condition, instead, tokenizers: {}, encode)


FRAMES = _frames_kind(lambda condition, batch, model: (model.frames(condition, batch),))
IMAGE_TOKENS = _frames_kind(lambda condition, batch, model: (model.image_features(condition, batch),))
