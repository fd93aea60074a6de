"""Settings and checks of both video transformers, ``custom_dit`` and ``wan``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from mindspeed_mm_dit.configs.condition import ClassLabel, Conditions, TextStates
from mindspeed_mm_dit.configs.limits import DEEP, LARGEST, MOST_LAYERS, check_between
from mindspeed_mm_dit.configs.parameters import Shape
from mindspeed_mm_dit.configs.predictor import PredictorConfig, check_shareable, count_of, shape_of
from mindspeed_mm_dit.errors import ConfigError

TEXT_LENGTH = 512
"""Tokens of a text in plans; Wan and the tutorial pad texts to this length."""
TUTORIAL_LATENTS = (13, 60, 104)
"""Latents of the tutorial's videos of 49 frames of 480 x 832 pixels."""
LONGEST_SIDE = 65_536
"""Most patches along one axis of a table of positions."""
_AXES = ("frames", "height", "width")
_TEXT, _LABELS = "condition_embedder.text", "condition_embedder.label_embedder.weight"
_WIDEST_HEAD = 128
"""Width of a head if only shapes are known; every published Wan has it."""


@dataclasses.dataclass(frozen=True)
class VideoTransformerConfig(PredictorConfig):
    """Base of both; each has its own keys for heads and text."""

    num_layers: int = 40
    """Number of transformer blocks."""
    patch_size: tuple[int, int, int] = (1, 2, 2)
    """[frames, height, width] of a patch, in latent pixels."""
    in_channels: int = 16
    """Channels of the latents."""
    out_channels: int = 16
    freq_dim: int = 256
    """Width of the sinusoidal timestep embedding; even."""
    ffn_dim: int = 13824
    """Width of the MLP's hidden layer."""
    rope_max_seq_len: int = 1024
    """Most patches along frames, height or width, 1 to 65536; no weight depends on it."""
    latent_size: tuple[int, int, int] = TUTORIAL_LATENTS
    """[frames, height, width] of the latents, in latent pixels. Our own key, unknown to Wan and MindSpeed-MM; no weight
    depends on it."""

    adaptable = ("latent_size", "rope_max_seq_len")
    heads_key = "num_heads"
    """Key of the section for the number of heads."""
    head_dim_key = "head_dim"
    """Key of the section for the width of a head."""
    affine_norms: ClassVar[tuple[str, ...]]
    """Norms of a block that have weights, besides those of queries and keys."""
    num_classes = 0  # (text is the only condition)
    class_dropout_prob = 0.0

    if TYPE_CHECKING:
        text_dim: int | None = None
        eps: float = 0.0

        @property
        def head_dim(self) -> int: ...

    def __post_init__(self) -> None:
        sizes = {self.heads_key: self.num_heads, self.head_dim_key: self.head_dim}
        text = ("text_dim",) if self.text_dim is not None else ()
        names = ("in_channels", "out_channels", *text, "freq_dim", "ffn_dim")
        for name, value in {**sizes, **{name: getattr(self, name) for name in names}}.items():
            check_between(f"predictor.{name}", value, 1, LARGEST)
        check_between("predictor.num_layers", self.num_layers, 1, MOST_LAYERS, DEEP)
        check_between("predictor.rope_max_seq_len", self.rope_max_seq_len, 1, LONGEST_SIDE)
        if len(self.patch_size) != 3 or min(self.patch_size) < 1:
            raise ConfigError(
                f"predictor.patch_size = {list(self.patch_size)}",
                "must be three positive whole numbers: frames, height and width of a patch",
                "Wan has [1, 2, 2]",
            )
        if self.head_dim < 6 or self.head_dim % 2:
            raise ConfigError(
                f"predictor.{self.head_dim_key} = {self.head_dim}",
                "must be even, and at least 6: rotary embeddings rotate pairs for frames, rows and columns",
                "Wan has 128",
            )
        if self.freq_dim % 2:
            raise ConfigError(
                f"predictor.freq_dim = {self.freq_dim}", "must be even: half of the embedding is cosines, half sines"
            )
        if not 0 < self.eps < 1:
            raise ConfigError(f"predictor.eps = {self.eps}", "must lie between 0 and 1", "Wan has 1e-6")
        try:
            self.check_latents(self.latent_shape)
        except ConfigError as error:
            what = f"predictor.latent_size = {list(self.latent_size)}"
            raise ConfigError(what, f"{error.what}: {error.reason}", error.cure) from None

    def check_latents(self, shape: Shape) -> None:
        """Raise ConfigError unless the network accepts latents of ``shape`` (C, F, H, W)."""
        if len(shape) != 4 or shape[0] != self.latent_channels or min(shape) < 1:
            raise ConfigError(
                f"latents of shape {shape}",
                f"do not fit the predictor, which takes ({self.latent_channels}, frames, height, width)",
            )
        for axis, size, patch in zip(_AXES, shape[1:], self.patch_size):
            if size % patch:
                raise ConfigError(
                    f"latents of {axis} {size}",
                    f"do not fit predictor.patch_size {list(self.patch_size)}: {size} % {patch} = {size % patch}",
                    f"use a multiple of {patch}",
                )
            if size // patch > self.rope_max_seq_len:
                raise ConfigError(
                    f"latents of {axis} {size}",
                    f"are {size // patch} patches, more than predictor.rope_max_seq_len = {self.rope_max_seq_len}",
                    "set it as high as the longest side in patches; no weight depends on it",
                )

    def resized(self, shape: Shape) -> VideoTransformerConfig:
        self.check_latents(shape)
        return dataclasses.replace(self, latent_size=shape[1:])  # type: ignore[arg-type]

    def reduced_width(self) -> VideoTransformerConfig:
        """Return the same network with at most 4 heads of the same width, MLP in proportion, and at most 4 blocks."""
        heads = min(self.num_heads, 4)
        sizes: dict[str, Any] = {self.heads_key: heads, "ffn_dim": self.ffn_dim * heads // self.num_heads}
        sizes |= self.settings_of_width(heads * self.head_dim)
        return dataclasses.replace(self, num_layers=min(self.num_layers, 4), **sizes)

    def settings_of_width(self, width: int) -> dict[str, Any]:
        """Return the other settings that depend on the width of a token."""
        return {}

    def check_context_parallel(self, ranks: int) -> None:
        check_shareable(ranks, {f"predictor.{self.heads_key}": self.num_heads, "tokens of a clip": self.num_tokens})

    @property
    def hidden_size(self) -> int:
        """Width D of a token."""
        return self.num_heads * self.head_dim

    @property
    def latent_shape(self) -> Shape:
        return (self.latent_channels, *self.latent_size)

    @property
    def conditions(self) -> Conditions:
        """The conditions that the settings enable: class label, states of a text."""
        label = (ClassLabel(self.num_classes, self.class_dropout_prob),) if self.num_classes else ()
        return Conditions(*label, *([TextStates(TEXT_LENGTH, self.text_dim)] if self.text_dim else []))

    @property
    def num_embeddings(self) -> int:
        """Rows of the table of labels: the classes and, with label dropout, the unconditional one."""
        return self.num_classes + (self.class_dropout_prob > 0)

    @property
    def num_tokens(self) -> int:
        return math.prod(size // patch for size, patch in zip(self.latent_size, self.patch_size))

    def settings_of_size(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the settings that decide the size of the network, each with the value of Wan 1.3B."""
        ordinary = {
            self.heads_key: 12, self.head_dim_key: 128, "num_layers": 30, "ffn_dim": 8960,
            "text_dim": self.text_dim and 4096, "freq_dim": 256, "out_channels": 16,
        }  # fmt: skip
        return {name: {name: value} for name, value in ordinary.items()}

    @classmethod
    def of_shapes(cls, shapes: Mapping[str, Shape]) -> Any:
        """Return the architecture that ``shapes`` imply, with heads of Wan's width if that fits."""
        if not all(f"blocks.0.{name}.weight" in shapes for name in ("attn1.to_q", "attn1.norm_q", *cls.affine_norms)):
            return None
        text, labels = f"{_TEXT}_embedder.linear_1.weight", shapes.get(_LABELS)
        D, C, *patch = shape_of(shapes, "patch_embedding.weight", 5)
        head_dim = _WIDEST_HEAD if D % _WIDEST_HEAD == 0 else D
        sizes: dict[str, Any] = {cls.heads_key: D // head_dim, cls.head_dim_key: head_dim}
        sizes |= {"patch_size": tuple(patch), "latent_size": tuple(patch)}
        if labels:  # (shapes do not show whether the last row is the unconditional class; it nearly always is)
            sizes["num_classes"] = labels[0] - 1
        return cls(
            **sizes, num_layers=count_of(shapes, "blocks"), in_channels=C,
            out_channels=shape_of(shapes, "proj_out.weight", 2)[0] // math.prod(patch),
            text_dim=shape_of(shapes, text, 2)[1] if text in shapes or not labels else None,
            freq_dim=shape_of(shapes, "condition_embedder.time_embedder.linear_1.weight", 2)[1],
            ffn_dim=shape_of(shapes, "blocks.0.ffn.net.0.proj.weight", 2)[0],
        )  # fmt: skip
