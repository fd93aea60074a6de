"""Sections ``predictor`` of the video transformers: ``custom_dit`` of MindSpeed-MM's tutorial, and Wan 2.1 and 2.2."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from mindspeed_mm_dit.configs.condition import ClassLabel, Conditions, FirstFrame, ImageTokens, TextStates
from mindspeed_mm_dit.configs.limits import Between, Count, Fraction, NumLayers, Positive, Probability
from mindspeed_mm_dit.configs.predictor import PredictorConfig, Shape, check_shareable
from mindspeed_mm_dit.errors import ConfigError

TEXT_LENGTH = 512
"""Tokens of a text in plans; Wan and the tutorial pad texts to this length."""
TUTORIAL_LATENTS = (13, 60, 104)
"""Latents of the tutorial's videos of 49 frames of 480 x 832 pixels."""
MASK_CHANNELS = 4
"""Channels of Wan's mask of conditioning frames: one for each frame that a latent frame encodes."""
CLIP_TOKENS = 257
"""Tokens of CLIP (ViT-H/14) for an image of 224 x 224 pixels."""
FRAME_DROPOUT = 0.1
"""Default probability of training without the first frame, for networks that also generate from text alone."""
_AXES = ("frames", "height", "width")


@dataclass(frozen=True)
class VideoTransformerConfig(PredictorConfig):
    """Base of both; each has its own keys for heads and text."""

    num_layers: NumLayers = 40
    """Number of transformer blocks."""
    patch_size: tuple[Positive, Positive, Positive] = (1, 2, 2)
    """[frames, height, width] of a patch, in latent pixels."""
    in_channels: Positive = 16
    """Channels of the latents."""
    out_channels: Positive = 16
    freq_dim: Positive = 256
    """Width of the sinusoidal timestep embedding; even."""
    ffn_dim: Positive = 13824
    """Width of the MLP's hidden layer."""
    rope_max_seq_len: Annotated[int, Between(1, 65_536)] = 1024
    """Most patches along frames, height or width, 1 to 65536; no weight depends on it."""
    latent_size: tuple[int, int, int] = TUTORIAL_LATENTS
    """[frames, height, width] of the latents, in latent pixels. Our own key, unknown to Wan and MindSpeed-MM; no weight
    depends on it."""

    adapter = "mindspeed_mm_dit.models.weight_adapters:VideoAdapter"
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
        super().__post_init__()
        if self.head_dim < 6 or self.head_dim % 2:
            raise self.error(
                self.head_dim_key,
                "must be even, and at least 6: rotary embeddings rotate pairs for frames, rows and columns. Wan has "
                "128.",
            )
        if self.freq_dim % 2:
            raise self.error("freq_dim", "must be even: half of the embedding is cosines, half sines.")
        if not 0 < self.eps < 1:
            raise self.error("eps", "must lie between 0 and 1. Wan has 1e-6.")
        try:
            self.check_latents(self.latent_shape)
        except ConfigError as error:
            raise self.error("latent_size", f"does not fit. {error}") from None

    def check_latents(self, shape: Shape) -> None:
        """Raise ConfigError unless the network accepts latents of ``shape`` (C, F, H, W)."""
        if len(shape) != 4 or shape[0] != self.latent_channels or min(shape) < 1:
            raise ConfigError(
                f"Latents of shape {shape} do not fit the predictor, which takes ({self.latent_channels}, frames, "
                "height, width)."
            )
        for axis, size, patch in zip(_AXES, shape[1:], self.patch_size):
            if size % patch:
                raise ConfigError(
                    f"Latents of {axis} {size} do not fit predictor.patch_size {list(self.patch_size)}: {size} % "
                    f"{patch} = {size % patch}. Use a multiple of {patch}."
                )
            if size // patch > self.rope_max_seq_len:
                raise ConfigError(
                    f"Latents of {axis} {size} are {size // patch} patches, more than predictor.rope_max_seq_len = "
                    f"{self.rope_max_seq_len}. Set it as high as the longest side in patches; no weight depends on it."
                )

    def resized(self, shape: Shape) -> VideoTransformerConfig:
        self.check_latents(shape)
        return replace(self, latent_size=shape[1:])  # type: ignore[arg-type]

    def reduced_width(self) -> VideoTransformerConfig:
        """Return the same network with at most 4 heads of the same width, MLP in proportion, and at most 4 blocks."""
        heads = min(self.num_heads, 4)
        sizes: dict[str, Any] = {self.heads_key: heads, "ffn_dim": self.ffn_dim * heads // self.num_heads}
        sizes |= self.settings_of_width(heads * self.head_dim)
        return replace(self, num_layers=min(self.num_layers, 4), **sizes)

    def settings_of_width(self, width: int) -> dict[str, Any]:
        """Return the other settings that depend on the width of a token."""
        return {}

    def check_context_parallel(self, ranks: int) -> None:
        check_shareable(ranks, {f"predictor.{self.heads_key}": self.num_heads, "the tokens of a clip": self.num_tokens})

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
        ordinary: dict[str, Any] = {
            self.heads_key: 12,
            self.head_dim_key: 128,
            "num_layers": 30,
            "ffn_dim": 8960,
            "freq_dim": 256,
        }
        ordinary |= {"text_dim": self.text_dim and 4096, "out_channels": 16}
        return {name: {name: value} for name, value in ordinary.items()}


@dataclass(frozen=True)
class CustomDiTConfig(VideoTransformerConfig):
    """The text-to-video DiT of MindSpeed-MM's tutorial "develop a new model", with its keys and defaults."""

    num_heads: Positive = 40
    """Number of attention heads."""
    head_dim: Positive = 128
    """Width of a head, even and at least 6; times ``num_heads`` it is the width D of a token."""
    text_dim: Positive | None = 4096
    """Width of the text encoder's states; null: no text condition and no cross-attention."""
    num_classes: Count = 0
    """Number of classes; label ``num_classes`` is the unconditional class of guidance. 0: condition on text only."""
    class_dropout_prob: Fraction = 0.1
    """Probability, in [0, 1), that a training label becomes the unconditional class; 0: there is no such class."""
    model_id: str = "custom_dit"

    eps = 1e-5
    """Epsilon of all norms, as in the tutorial; not a key of model.json."""
    network = "mindspeed_mm_dit.models.video_transformer:CustomDiT"
    affine_norms = ("norm1", "norm3")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.num_classes or self.text_dim):
            raise self.error(
                "num_classes", "and text_dim = null leave the network without a condition. Set one of them."
            )


@dataclass(frozen=True)
class WanConfig(VideoTransformerConfig):
    """Wan 2.1 and 2.2 (Wan Team 2025), with the keys of a published ``transformer/config.json``.

    The defaults are those of the 14B text-to-video models. An image-to-video network has 2 C + 4 ``in_channels`` for
    latents of C ``out_channels``, or ``expand_timesteps``.
    """

    num_attention_heads: Positive = 40
    """Number of attention heads."""
    attention_head_dim: Positive = 128
    """Width of a head, even and at least 6; times ``num_attention_heads`` it is the width D of a token."""
    text_dim: Positive = 4096
    """Width of the text encoder's states."""
    eps: float = 1e-6
    """Epsilon of all norms, between 0 and 1."""
    cross_attn_norm: bool = True
    """Normalise before cross-attention, as the published networks do; must be true."""
    qk_norm: Literal["rms_norm_across_heads"] = "rms_norm_across_heads"
    """Normalise queries and keys over the whole width, before they are split into heads."""
    image_dim: Positive | None = None
    """Width of CLIP's features of the first frame, which Wan 2.1's image-to-video attends to; null: none."""
    added_kv_proj_dim: int | None = None
    """Input width of the keys and values of these features: that of a token; null without ``image_dim``."""
    pos_embed_seq_len: Positive | None = None
    """Number of features per sample, if they have learned positions (first and last frame); null: no positions."""
    expand_timesteps: bool = False
    """Embed a timestep per token, with the clean first frame at time 0, as Wan 2.2's TI2V-5B does. A key of
    diffusers' model_index.json."""
    last_frame: bool = False
    """Condition on the last frame too. Our own key; no weight depends on it."""
    frame_dropout_prob: Probability | None = None
    """With ``expand_timesteps``: probability of training on a clip without its first frame, from text alone; null: 0.1.
    Other networks always take the frame. Our own key."""
    model_id: str = "wan"

    heads_key, head_dim_key = "num_attention_heads", "attention_head_dim"
    network = "mindspeed_mm_dit.models.video_transformer:Wan"
    diffusers_class = "WanTransformer3DModel"
    adapter = "mindspeed_mm_dit.models.weight_adapters:WanAdapter"
    affine_norms = ("norm2",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.cross_attn_norm:
            raise self.error(
                "cross_attn_norm",
                "is not supported: all published text-to-video networks of Wan have that norm. Set it to true.",
            )
        self._check_image()

    @property
    def frame_rate(self) -> float:  # type: ignore[override]
        """Frames per second as published: 24 for Wan 2.2's TI2V-5B, 16 for the others."""
        return 24.0 if self.expand_timesteps else 16.0

    def _check_image(self) -> None:
        """Raise ConfigError unless the settings are those of one kind of image-to-video network, or of none."""
        wide = self.in_channels == 2 * self.out_channels + MASK_CHANNELS
        problems = {
            "image_dim": self.image_dim is not None and not wide,
            "pos_embed_seq_len": self.pos_embed_seq_len is not None and not self.image_dim,
            "expand_timesteps": self.expand_timesteps and wide,
            "patch_size": self.expand_timesteps and self.patch_size[0] > 1,
            "last_frame": self.last_frame and not wide,
            "frame_dropout_prob": self.frame_dropout_prob and not self.expand_timesteps,
        }
        for name, is_wrong in problems.items():
            if is_wrong:
                raise self.error(
                    name,
                    f"does not go with in_channels = {self.in_channels}, out_channels = {self.out_channels}"
                    f"{'' if self.image_dim else ', image_dim = null'}. Image-to-video takes 2 C + 4 channels for "
                    "latents of C; TI2V-5B has as many as the latents, and patches of one frame.",
                )
        keys = self.hidden_size if self.image_dim else None
        if self.added_kv_proj_dim != keys:
            why = "features of an image are embedded to the width of a token" if keys else "image_dim is null"
            raise self.error("added_kv_proj_dim", f"must be {keys or 'null'}, because {why}.")

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
    def conditions(self) -> Conditions:
        """The text and, for image-to-video, the conditioning frames and CLIP's features of them."""
        shape = (self.latent_channels, *self.latent_size)
        dropout = FRAME_DROPOUT if self.frame_dropout_prob is None else self.frame_dropout_prob
        frame_dropout = dropout if self.expand_timesteps else 0.0
        frames = (FirstFrame(shape, self.mask_channels, self.last_frame, frame_dropout),) if self.mask_channels else ()
        tokens = self.pos_embed_seq_len or CLIP_TOKENS
        features = (ImageTokens(tokens, self.image_dim, self.last_frame),) if self.image_dim else ()
        return Conditions(*super().conditions, *frames, *features)

    def settings_of_width(self, width: int) -> dict[str, Any]:
        return {"added_kv_proj_dim": width} if self.image_dim else {}
