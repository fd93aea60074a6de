"""Conditions: the item of a sample that each is made from, its arrays, and its unconditional value for dropout.

A batch holds source arrays, the arrays of each condition, and the objective's random numbers. The network is called as
``predictor(x_t, t, *condition)``, in the order of ``Conditions.names``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import numpy as np

from mindspeed_mm_dit.configs.text_encoder import TextEncoderConfig
from mindspeed_mm_dit.errors import ConfigError

Arrays = dict[str, np.ndarray]
Kind = TypeVar("Kind")


class Condition(ABC):
    """Base of the kinds of condition; a predictor's config lists those it takes."""

    item: ClassVar[str]
    """Item of a sample that it is made from: "label", "caption", "vector"."""
    dropout: float
    """Probability that a training sample is unconditional; guidance needs it (Ho & Salimans 2022)."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Names of its arrays, each (B, ...), in the order of the network's arguments."""

    @property
    def dropout_key(self) -> str:
        """Name of the random number that decides whether it is dropped; conditions with the same key drop together."""
        return self.names[0]

    @property
    def has_unconditional(self) -> bool:
        """Whether a network trained with it learns to predict without it, so that guidance works."""
        return self.dropout > 0

    @abstractmethod
    def unconditional(self, count: int) -> Arrays:
        """Return the unconditional value for ``count`` samples; ConfigError if only a text encoder can compute it."""

    @abstractmethod
    def examples(self, count: int) -> Arrays:
        """Return ``count`` example conditions to try a network with; the last is unconditional, if it can be."""

    def meta_arrays(self) -> Arrays:
        """Return arrays like those of one sample that take no memory, for their shape and dtype."""
        return self.examples(1)

    def dropped(self, arrays: Mapping[str, np.ndarray], drops: np.ndarray) -> Arrays:
        """Return the condition ``arrays``, with the unconditional value where ``drops`` (B,) is true."""
        unconditional = self.unconditional(len(drops))
        shaped = {name: drops.reshape(-1, *[1] * (arrays[name].ndim - 1)) for name in self.names}
        return {name: np.where(shaped[name], unconditional[name], arrays[name]) for name in self.names}


class FloatCondition(Condition):
    """Base of the conditions that are float32 arrays."""

    @property
    @abstractmethod
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of each of its arrays for one sample, in the order of ``names``."""

    def meta_arrays(self) -> Arrays:
        return {n: np.broadcast_to(np.float32(0), (1, *shape)) for n, shape in zip(self.names, self.shapes)}

    def examples(self, count: int) -> Arrays:
        """Return normally distributed arrays."""
        rng = np.random.default_rng(0)
        return {n: rng.standard_normal((count, *shape), np.float32) for n, shape in zip(self.names, self.shapes)}


@dataclass(frozen=True)
class ClassLabel(Condition):
    """A class label: ``labels`` (B,) int64, each 0 ... num_classes - 1, or num_classes for the unconditional class."""

    num_classes: int
    dropout: float
    item = "label"
    names = ("labels",)

    def unconditional(self, count: int) -> Arrays:
        return {"labels": np.full(count, self.num_classes, np.int64)}

    def meta_arrays(self) -> Arrays:
        return {"labels": np.zeros(1, np.int64)}

    def examples(self, count: int) -> Arrays:
        labels = np.arange(count) * 7 % self.num_classes
        if self.has_unconditional:
            labels[-1] = self.num_classes
        return {"labels": labels}


class TextCondition(FloatCondition):
    """Base of the conditions that a text encoder makes from a caption.

    Its unconditional value is the encoding of the empty caption, from a text encoder or a cache made with one.
    ``caption_dropout_prob`` of data.json sets how often a caption is dropped.
    """

    name: str
    item = "caption"
    dropout = 0.0
    has_unconditional = True

    @property
    @abstractmethod
    def parts(self) -> tuple[SingleEncoderText, ...]:
        """The output of each text encoder that it uses; a cache stores them separately."""

    @property
    def published(self) -> dict[int, dict[str, Any]]:
        """Published settings of its text encoders, by index; they apply where model.json leaves them out."""
        return {}

    @abstractmethod
    def widths_of(self, encoders: Sequence[TextEncoderConfig]) -> dict[str, tuple[int | None, int]]:
        """Return the widths that the ``encoders`` have and the network takes, by the predictor's settings.

        The first is None for an output that they lack.
        """

    def check_encoders(self, encoders: Sequence[TextEncoderConfig]) -> None:
        """Raise ConfigError unless their output, by their config.json, has the widths that the predictor takes."""
        for setting, (width, expected) in self.widths_of(encoders).items():
            if width != expected:
                kind, has, are = ("pooled vector", "has", "is") if "pooled" in setting else ("states", "have", "are")
                problem = f"{has} width {width}" if width else f"{are} not available"
                hint = f"Write {width}." if width else "Use a text encoder that pools, such as clip or bert."
                raise ConfigError(
                    f"predictor.{setting} = {expected} does not fit the text encoder, whose {kind} {problem} (by its "
                    f"config.json). {hint}"
                )

    def unconditional(self, count: int) -> Arrays:
        """Raise ConfigError: only a text encoder can compute it."""
        raise ConfigError(
            f"The unconditional value of the predictor's {self.name} can only be computed by a text encoder."
        )


@dataclass(frozen=True, kw_only=True)
class SingleEncoderText(TextCondition):
    """Base of the conditions of one text encoder."""

    encoder: int = 0
    """Index of the text encoder in model.json that makes it."""
    name: str
    """Name of its array."""
    setting: str
    """Key of the predictor's section that holds ``width``."""
    shared_dropout_key: str = ""
    """Dropout key that it shares with other conditions; empty: its name."""
    as_published: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Published settings of its text encoder."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def dropout_key(self) -> str:
        return self.shared_dropout_key or self.name

    @property
    def parts(self) -> tuple[SingleEncoderText, ...]:
        return (self,)

    @property
    def published(self) -> dict[int, dict[str, Any]]:
        return {self.encoder: dict(self.as_published)}

    def widths_of(self, encoders: Sequence[TextEncoderConfig]) -> dict[str, tuple[int | None, int]]:
        return {self.setting: (self.width_of(encoders[self.encoder]), self.shapes[0][-1])}

    @abstractmethod
    def width_of(self, encoder: TextEncoderConfig) -> int | None:
        """Return the width of its output of ``encoder``, by config.json; None if the encoder has no such output."""


@dataclass(frozen=True)
class TextStates(SingleEncoderText):
    """The states of a text encoder: ``text`` (B, L, D) float32, L tokens of width D."""

    length: int
    width: int
    name: str = field(default="text", kw_only=True)
    setting: str = field(default="text_dim", kw_only=True)

    def width_of(self, encoder: TextEncoderConfig) -> int:
        return encoder.states_width()

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.length, self.width),)


@dataclass(frozen=True)
class PooledText(SingleEncoderText):
    """One vector per caption, from a text encoder that pools (CLIP, MiniLM): ``pooled`` (B, P) float32."""

    width: int
    name: str = field(default="pooled", kw_only=True)
    setting: str = field(default="pooled_dim", kw_only=True)

    def width_of(self, encoder: TextEncoderConfig) -> int | None:
        return encoder.pooled_width()

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.width,),)


@dataclass(frozen=True)
class Vector(FloatCondition):
    """A vector that comes with a sample, e.g. an image embedding: ``vector`` (B, P) float32; zeros if unconditional."""

    width: int
    dropout: float
    name: str = "vector"
    """Name of its array."""
    item = "vector"

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def unconditional(self, count: int) -> Arrays:
        return {self.name: np.zeros((count, self.width), np.float32)}

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.width,),)

    def examples(self, count: int) -> Arrays:
        vectors = super().examples(count)
        vectors[self.name][-1] *= not self.has_unconditional
        return vectors


class ImageCondition(FloatCondition):
    """Base of the conditions made from frames of the clip itself; guidance keeps them in both of its predictions."""

    item = "image"
    dropout = 0.0
    has_unconditional = True

    def unconditional(self, count: int) -> Arrays:
        """Return nothing: an unconditional prediction still sees the frames."""
        return {}


@dataclass(frozen=True)
class FirstFrame(ImageCondition):
    """The first frame, and perhaps the last: ``frames`` (B, M + C, F, H, W) float32, M channels of mask, then latents.

    With M = 1 the mask is 1 at the first latent frame, whose latents are those of the frame alone. With M = 4 they are
    the latents of a clip that is grey except for the conditioning frames; channel j of latent frame i is 1 if pixel
    frame max(0, 4 i + j - 3) is one of them.
    """

    shape: tuple[int, ...]
    """(C, F, H, W) of the latents."""
    mask_channels: int
    with_last: bool = False
    """Whether the last frame is a condition too."""
    dropout: float = 0.0
    names = ("frames",)

    def mask(self, latent_frames: int) -> np.ndarray:
        """Return the mask (M, F) float32 of a clip of F latent frames."""
        mask = np.zeros((self.mask_channels, latent_frames), np.float32)
        mask[:, 0] = 1
        if self.with_last:
            mask[-1, -1] = 1
        return mask

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.mask_channels + self.shape[0], *self.shape[1:]),)

    def examples(self, count: int) -> Arrays:
        """Return the mask, and normally distributed latents where it is not 0."""
        channels, frames, *size = self.shape
        mask = np.broadcast_to(self.mask(frames)[:, :, None, None], (count, self.mask_channels, frames, *size))
        latents = np.random.default_rng(0).standard_normal((count, channels, frames, *size), np.float32)
        return {"frames": np.concatenate([mask, latents * mask.any(1, keepdims=True)], 1)}


@dataclass(frozen=True)
class ImageTokens(ImageCondition):
    """CLIP's features of the conditioning frames: ``image_embeds`` (B, L, width) float32, first frame first."""

    length: int
    width: int
    with_last: bool = False
    """Whether the last frame is a condition too."""
    names = ("image_embeds",)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.length, self.width),)


class Conditions(tuple[Condition, ...]):
    """All conditions of a predictor, in the order of the network's arguments.

    Raises ConfigError if two have the same name.
    """

    def __new__(cls, *conditions: Condition) -> Conditions:
        """Collect ``conditions``."""
        names = [name for condition in conditions for name in condition.names]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"Two conditions of the predictor have the name {twice[0]!r}. Give each its own name.")
        return super().__new__(cls, conditions)

    def __getnewargs__(self) -> tuple[Condition, ...]:
        """Return what ``__new__`` takes, for a copy or a pickle."""
        return tuple(self)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all arrays, in the order of the network's arguments."""
        return tuple(name for condition in self for name in condition.names)

    @property
    def items(self) -> tuple[str, ...]:
        """Items of a sample that they are made from, each once, without frames of the clip itself."""
        return tuple(dict.fromkeys(condition.item for condition in self if not isinstance(condition, ImageCondition)))

    @property
    def guided(self) -> Conditions:
        """The conditions that guidance strengthens: all but frames of the clip itself."""
        return Conditions(*(condition for condition in self if not isinstance(condition, ImageCondition)))

    @property
    def frames(self) -> FirstFrame | None:
        """The condition on first and last frames, or None."""
        return self._first_of_type(FirstFrame)

    @property
    def needs_frames(self) -> bool:
        """Whether sampling needs a first frame."""
        return self.frames is not None and self.frames.mask_channels > 1

    def cached_names(self, extra_images: Collection[str]) -> tuple[str, ...]:
        """Return the names of the arrays about conditioning frames in a cache; ``extra_images``: those of each clip.

        A first frame of the clip itself needs none: the clip's latents contain it.
        """
        frames, tokens = self.frames, self.image_tokens
        from_clip = frames is None or (frames.mask_channels == 1 and not extra_images)
        return (*(() if from_clip else ("frame_mean",)), *(tokens.names if tokens else ()))

    @property
    def image_tokens(self) -> ImageTokens | None:
        """The condition on CLIP's features, or None."""
        return self._first_of_type(ImageTokens)

    @property
    def has_unconditional(self) -> bool:
        """Whether all of them have an unconditional value, so that guidance works."""
        return bool(self) and all(condition.has_unconditional for condition in self)

    @property
    def label(self) -> ClassLabel | None:
        """The condition on a class label, or None."""
        return self._first_of_type(ClassLabel)

    def _first_of_type(self, kind: type[Kind]) -> Kind | None:
        return next((condition for condition in self if isinstance(condition, kind)), None)

    def unconditional(self, count: int) -> Arrays:
        """Return the unconditional value of each for ``count`` samples."""
        return {name: array for condition in self for name, array in condition.unconditional(count).items()}

    def examples(self, count: int) -> Arrays:
        """Return ``count`` examples of each, to try a network with."""
        return {name: array for condition in self for name, array in condition.examples(count).items()}

    def meta_arrays(self) -> Arrays:
        """Return arrays like those of one sample that take no memory, for their shapes and dtypes."""
        return {name: array for condition in self for name, array in condition.meta_arrays().items()}

    def dropout_keys(self) -> dict[str, int]:
        """Return an index for each dropout key; conditions with the same key are dropped together."""
        keys = dict.fromkeys(condition.dropout_key for condition in self)
        return {key: number for number, key in enumerate(keys)}


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

    @property
    def parts(self) -> tuple[TextStates | PooledText, ...]:
        """The states of each encoder and the pooled vectors, under separate names; their widths are not checked."""
        states = [TextStates(self.length, 0, encoder=number, name=f"text_{number}") for number in range(ENCODERS)]
        return (*states, *(PooledText(0, encoder=number, name=f"pooled_{number}") for number in POOLING))

    @property
    def published(self) -> dict[int, dict[str, Any]]:
        return {**{number: {"states": "penultimate"} for number in POOLING}, ENCODERS - 1: {"attend_padding": True}}

    def widths_of(self, encoders: Sequence[TextEncoderConfig]) -> dict[str, tuple[int | None, int]]:
        *clips, t5 = (encoder.states_width() for encoder in encoders)
        pooled = [encoders[number].pooled_width() for number in POOLING]
        total = None if None in pooled else sum(filter(None, pooled))
        states = max(sum(clips), t5)
        return {"joint_attention_dim": (states, self.width), "pooled_projection_dim": (total, self.pooled)}

    def check_encoders(self, encoders: Sequence[TextEncoderConfig]) -> None:
        """Raise ConfigError unless the widths fit the predictor, and both CLIPs have the same number of tokens."""
        super().check_encoders(encoders)
        first, second = (encoders[number].max_length for number in POOLING)
        if first != second:
            raise ConfigError(
                f"text_encoder[1].max_length = {second} must be {first}, that of the first encoder, because their "
                "states are concatenated."
            )

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return (self.length, self.width), (self.pooled,)
