"""Section ``predictor`` for video transformers.

What they share, ``custom_dit`` and ``wan`` (2.1 and 2.2, from text or images).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from mindspeed_mm_dit.configs.condition import ClassLabel, Conditions, FirstFrame, ImageTokens, TextStates
from mindspeed_mm_dit.configs.limits import DEEP, LARGEST, MOST_LAYERS, check_between
from mindspeed_mm_dit.configs.predictor import (
    AdaptedTensor,
    PredictorConfig,
    Shape,
    SourceTensor,
    check_shareable,
    count_of,
    shape_of,
)
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


@dataclass(frozen=True)
class CustomDiTConfig(VideoTransformerConfig):
    """The text-to-video DiT of MindSpeed-MM's tutorial "develop a new model", with its keys and defaults."""

    num_heads: int = 40
    """Number of attention heads."""
    head_dim: int = 128
    """Width of a head, even and at least 6; times ``num_heads`` it is the width D of a token."""
    text_dim: int | None = 4096
    """Width of the text encoder's states; null: no text condition and no cross-attention."""
    num_classes: int = 0
    """Number of classes; label ``num_classes`` is the unconditional class of guidance. 0: condition on text only."""
    class_dropout_prob: float = 0.1
    """Probability, in [0, 1), that a training label becomes the unconditional class; 0: there is no such class."""
    model_id: str = "custom_dit"

    eps = 1e-5
    """Epsilon of all norms, as in the tutorial; not a key of model.json."""
    network = "mindspeed_mm_dit.models.video_transformer:CustomDiT"
    affine_norms = ("norm1", "norm3")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_between("predictor.num_classes", self.num_classes, 0, LARGEST)
        if not (self.num_classes or self.text_dim):
            raise ConfigError(
                "predictor.num_classes = 0",
                "and text_dim = null leave the network without a condition",
                "set one of them",
            )
        if not 0.0 <= self.class_dropout_prob < 1.0:
            raise ConfigError(f"predictor.class_dropout_prob = {self.class_dropout_prob}", "must lie in [0, 1)")


MASK_CHANNELS = 4
"""Channels of the mask of conditioning frames: one for each frame that a latent frame encodes."""
CLIP_TOKENS = 257
"""Tokens of CLIP (ViT-H/14) for an image of 224 x 224 pixels."""
FRAME_DROPOUT = 0.1
"""Default probability of training without the first frame, for networks that also generate from text alone."""
OURS = ("latent_size", "expand_timesteps", "last_frame", "frame_dropout_prob", "model_id")
"""Keys that a published config.json does not have."""
_IMAGE, _EMBEDDER = "condition_embedder.image_embedder", "patch_embedding.weight"


@dataclass(frozen=True)
class WanConfig(VideoTransformerConfig):
    """Wan 2.1 and 2.2 (Wan Team 2025), with the keys of a published ``transformer/config.json``.

    The defaults are those of the 14B text-to-video models. An image-to-video network has 2 C + 4 ``in_channels`` for
    latents of C ``out_channels``, or ``expand_timesteps``.
    """

    num_attention_heads: int = 40
    """Number of attention heads."""
    attention_head_dim: int = 128
    """Width of a head, even and at least 6; times ``num_attention_heads`` it is the width D of a token."""
    text_dim: int = 4096
    """Width of the text encoder's states."""
    eps: float = 1e-6
    """Epsilon of all norms, between 0 and 1."""
    cross_attn_norm: bool = True
    """Normalise before cross-attention, as the published networks do; must be true."""
    qk_norm: Literal["rms_norm_across_heads"] = "rms_norm_across_heads"
    """Normalise queries and keys over the whole width, before they are split into heads."""
    image_dim: int | None = None
    """Width of CLIP's features of the first frame, which Wan 2.1's image-to-video attends to; null: none."""
    added_kv_proj_dim: int | None = None
    """Input width of the keys and values of these features: that of a token; null without ``image_dim``."""
    pos_embed_seq_len: int | None = None
    """Number of features per sample, if they have learned positions (first and last frame); null: no positions."""
    expand_timesteps: bool = False
    """Embed a timestep per token, with the clean first frame at time 0, as Wan 2.2's TI2V-5B does. A key of
    diffusers' model_index.json."""
    last_frame: bool = False
    """Condition on the last frame too. Our own key; no weight depends on it."""
    frame_dropout_prob: float | None = None
    """With ``expand_timesteps``: probability of training on a clip without its first frame, from text alone; null: 0.1.
    Other networks always take the frame. Our own key."""
    model_id: str = "wan"

    heads_key, head_dim_key = "num_attention_heads", "attention_head_dim"
    network = "mindspeed_mm_dit.models.video_transformer:Wan"
    diffusers_class = "WanTransformer3DModel"
    affine_norms = ("norm2",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.cross_attn_norm:
            raise ConfigError(
                "predictor.cross_attn_norm = false",
                "all published text-to-video networks of Wan have that norm, and only those are supported",
                "set it to true",
            )
        self._check_image()

    @property
    def frame_rate(self) -> float:  # type: ignore[override]
        """Frames per second as published: 24 for Wan 2.2's TI2V-5B, 16 for the others."""
        return 24.0 if self.expand_timesteps else 16.0

    def _check_image(self) -> None:
        """Raise ConfigError unless the settings are those of one kind of image-to-video network, or of none."""
        for name in ("image_dim", "pos_embed_seq_len"):
            if (value := getattr(self, name)) is not None:
                check_between(f"predictor.{name}", value, 1, LARGEST)
        if self.frame_dropout_prob is not None:
            check_between("predictor.frame_dropout_prob", self.frame_dropout_prob, 0.0, 1.0)
        wide = self.in_channels == 2 * self.out_channels + MASK_CHANNELS
        problems = {
            f"image_dim = {self.image_dim}": self.image_dim is not None and not wide,
            f"pos_embed_seq_len = {self.pos_embed_seq_len}": self.pos_embed_seq_len is not None and not self.image_dim,
            "expand_timesteps = true": self.expand_timesteps and wide,
            f"patch_size = {list(self.patch_size)}": self.expand_timesteps and self.patch_size[0] > 1,
            "last_frame = true": self.last_frame and not wide,
            f"frame_dropout_prob = {self.frame_dropout_prob}": self.frame_dropout_prob and not self.expand_timesteps,
        }
        for what, wrong in problems.items():
            if wrong:
                raise ConfigError(
                    f"predictor.{what}",
                    f"does not go with in_channels = {self.in_channels}, out_channels = {self.out_channels}"
                    + ("" if self.image_dim else ", image_dim = null"),
                    "image-to-video takes 2 C + 4 channels for latents of C; TI2V-5B has as many as the latents, and "
                    "patches of one frame",
                )
        keys = self.hidden_size if self.image_dim else None
        if self.added_kv_proj_dim != keys:
            raise ConfigError(
                f"predictor.added_kv_proj_dim = {self.added_kv_proj_dim}",
                f"must be {keys}: "
                + ("features of an image are embedded to the width of a token" if keys else "image_dim is null"),
            )

    @property
    def num_heads(self) -> int:  # type: ignore[override]
        """Number of attention heads."""
        return self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.attention_head_dim

    @property
    def latent_channels(self) -> int:
        """Channels C of a latent: those of the input without mask and latents of conditioning frames."""
        return self.out_channels if self.in_channels == 2 * self.out_channels + MASK_CHANNELS else self.in_channels

    @property
    def mask_channels(self) -> int:
        """Channels of the mask of conditioning frames; 0 for text-to-video."""
        return MASK_CHANNELS if self.latent_channels < self.in_channels else int(self.expand_timesteps)

    @property
    def adaptable(self) -> tuple[str, ...]:  # type: ignore[override]
        """Settings that may differ in ``adapt_weight``, whose source can be a text-to-video network."""
        of_images = ("in_channels", "image_dim", "added_kv_proj_dim", "pos_embed_seq_len", *OURS[1:4])
        return (*VideoTransformerConfig.adaptable, *(of_images if self.mask_channels else ()))

    @property
    def conditions(self) -> Conditions:
        """The text and, for image-to-video, the conditioning frames and CLIP's features of them."""
        shape = (self.latent_channels, *self.latent_size)
        dropout = FRAME_DROPOUT if self.frame_dropout_prob is None else self.frame_dropout_prob
        frame_dropout = dropout if self.expand_timesteps else 0.0
        frames = (FirstFrame(shape, self.mask_channels, self.last_frame, frame_dropout),) if self.mask_channels else ()
        tokens = self.pos_embed_seq_len or CLIP_TOKENS
        features = (ImageTokens(tokens, self.image_dim, self.last_frame),) if self.image_dim else ()
        return Conditions(*super().conditions, *frames, *features)

    def adapt_weight(self, name: str, source: SourceTensor) -> AdaptedTensor | None:
        """Widen the patch embedding of a text-to-video network with zeros for the channels of an image."""
        missing = source.shape[1] - source.value.shape[1] if name == _EMBEDDER else 0
        if missing != self.in_channels - self.latent_channels or not missing:
            return super().adapt_weight(name, source)
        zeros = np.zeros((len(source.value), missing, *source.shape[2:]), source.value.dtype)
        return AdaptedTensor(
            np.concatenate([source.value, zeros], 1), f"zeros for the {missing} channels of the conditioning frames"
        )

    @property
    def defaults_for_missing(self) -> tuple[str, ...]:
        return self.heads_key, self.head_dim_key

    @classmethod
    def of_diffusers(cls, section: Mapping[str, Any]) -> dict[str, Any]:
        """Return section ``predictor`` for the config.json of a diffusers folder, for the smallest latents."""
        settings = {key: value for key, value in section.items() if not key.startswith("_")}
        return settings | {"latent_size": settings.get("patch_size", cls.patch_size)}

    def to_diffusers(self) -> dict[str, Any]:
        """Return the config.json of a WanTransformer3DModel."""
        settings = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in OURS}
        return {"_class_name": self.diffusers_class, **settings}

    def settings_of_width(self, width: int) -> dict[str, Any]:
        return {"added_kv_proj_dim": width} if self.image_dim else {}

    def is_optional(self, name: str) -> bool:
        """Return whether ``name`` belongs to CLIP's features, which a text-to-video network lacks."""
        return name.startswith(f"{_IMAGE}.") or any(f".attn2.{part}" in name for part in ("add_", "norm_added"))

    @classmethod
    def of_shapes(cls, shapes: Mapping[str, Shape]) -> Any:
        config = super().of_shapes(shapes)
        if config is None or f"{_IMAGE}.norm1.weight" not in shapes:
            return config
        positions = shapes.get(f"{_IMAGE}.pos_embed")
        return replace(
            config, image_dim=shapes[f"{_IMAGE}.norm1.weight"][0], added_kv_proj_dim=config.hidden_size,
            pos_embed_seq_len=positions and positions[1],
        )  # fmt: skip
