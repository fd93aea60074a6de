"""Sections ``predictor`` of the transformers with joint attention, in which text and image attend to each other.

Keys and defaults are those of each family's published ``transformer/config.json``, except that ``in_channels`` counts
channels of latents. :mod:`models.weight_adapters` translates from and to diffusers' files.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from mindspeed_mm_dit.configs.condition import Conditions, JoinedText, PooledText, TextStates
from mindspeed_mm_dit.configs.limits import Between, NumLayers, Positive, check_between
from mindspeed_mm_dit.configs.predictor import PredictorConfig, Shape, check_shareable
from mindspeed_mm_dit.errors import ConfigError

GUIDANCE, MAX_EMBEDDED_GUIDANCE = 3.5, 100.0
"""Guidance scale that diffusers trains and samples distilled networks with, and the largest."""
UNIT = 32
"""Z-Image pads texts and images to multiples of this many tokens."""
_EmbeddedGuidance = Annotated[float, Between(0.0, MAX_EMBEDDED_GUIDANCE)]
_RopeTheta = Annotated[float, Between(1.0, 1e9)]


@dataclass(frozen=True)
class JointConfig(PredictorConfig):
    """Base of the model families; each has its own defaults."""

    num_layers: NumLayers = 19
    """Number of blocks with separate weights for image and text."""
    num_attention_heads: Positive = 24
    """Number of attention heads."""
    attention_head_dim: Positive = 128
    """Width of a head; times ``num_attention_heads`` it is the width D of a token."""
    joint_attention_dim: Positive = 4096
    """Width of the text encoder's states."""
    in_channels: Positive = 16
    """Channels of the latents."""
    text_length: Positive = 512
    """Tokens of a text with its padding. Only estimates of arithmetic and memory use it; no weight depends on it."""
    latent_size: tuple[int, int] = (128, 128)
    """[height, width] of the latents in latent pixels; no weight depends on it."""

    published_texts: ClassVar[Mapping[str, Any]] = {}
    """Published settings of the first text encoder."""
    data_time = 0
    published_sampler = ("euler", 28)
    patch_size = 2
    rope_theta = 10000.0  # a key of some model families
    num_classes = 0  # only texts are conditions
    class_dropout_prob = 0.0
    z_dims = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_latents(self.latent_size, f"predictor.latent_size = {list(self.latent_size)}")
        axes = self.axes_dims_rope
        if axes and (min(axes) < 2 or any(width % 2 for width in axes) or sum(axes) != self.head_dim):
            raise self.error(
                "axes_dims_rope", f"must be even numbers whose sum is the width of a head, {self.head_dim}."
            )

    def _check_latents(self, size: tuple[int, ...], what: str) -> None:
        if len(size) != 2 or min(size) < 1 or any(side % self.patch_size for side in size):
            raise ConfigError(f"{what} must have a height and a width that are multiples of {self.patch_size}.")

    def resized(self, shape: Shape) -> JointConfig:
        if len(shape) != 3 or shape[0] != self.in_channels:
            return super().resized(shape)  # type: ignore[return-value]
        self._check_latents(shape[1:], f"latents of shape {shape}")
        return dataclasses.replace(self, latent_size=shape[1:])  # type: ignore[arg-type]

    def reduced_width(self) -> JointConfig:
        """Return the same network with at most 4 heads of the same width, and at most 4 blocks of each kind."""
        names = [field.name for field in dataclasses.fields(self)]
        layers = {n: min(getattr(self, n), 4) for n in names if n.startswith("num_") and n.endswith("_layers")}
        return dataclasses.replace(self, num_attention_heads=min(self.num_attention_heads, 4), **layers)  # type: ignore[arg-type]

    def check_context_parallel(self, ranks: int) -> None:
        heads = {"predictor.num_attention_heads": self.num_attention_heads}
        check_shareable(ranks, {**heads, "the tokens of an image": self.num_tokens})

    @property
    def axes_dims_rope(self) -> tuple[int, ...]:
        """Rotary channels of a head for each axis of positions; () if a family has none."""
        return ()

    @property
    def num_heads(self) -> int:  # type: ignore[override]
        """Number of attention heads."""
        return self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.attention_head_dim

    @property
    def hidden_size(self) -> int:
        """Width D of a token."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def out_channels(self) -> int:
        return self.in_channels

    @property
    def latent_shape(self) -> Shape:
        return (self.in_channels, *self.latent_size)

    @property
    def num_tokens(self) -> int:
        """Tokens of an image."""
        return math.prod(side // self.patch_size for side in self.latent_size)

    @property
    def texts(self) -> TextStates:
        """The states of the text, from the first text encoder."""
        width, published = self.joint_attention_dim, self.published_texts
        return TextStates(self.text_length, width, setting="joint_attention_dim", as_published=published)

    @property
    def conditions(self) -> Conditions:
        return Conditions(self.texts)


@dataclass(frozen=True)
class FluxConfig(JointConfig):
    """FLUX.1 (Black Forest Labs 2024); the defaults are those of FLUX.1-schnell."""

    num_single_layers: NumLayers = 38
    """Number of blocks after them in which image and text share one set of weights."""
    pooled_projection_dim: Positive = 768
    """Width of the pooled vector of the text."""
    pooled_encoder: Literal[0, 1] = 1
    """Index of the text encoder in model.json that makes that vector: the second, or 0 if the first makes both."""
    axes_dims_rope: tuple[int, int, int] = (16, 56, 56)  # type: ignore[assignment]
    """Rotary channels of a head for a constant 0, the row and column of a patch; even."""
    guidance_embeds: bool = False
    """Take the guidance scale as an input, as guidance-distilled networks do (FLUX.1-dev)."""
    guidance: _EmbeddedGuidance = GUIDANCE
    """With ``guidance_embeds``: that scale, in training and sampling, 0 to 100."""
    model_id: str = "flux"

    network = "mindspeed_mm_dit.models.flux:Flux"
    adapter = "mindspeed_mm_dit.models.weight_adapters:FluxAdapter"
    diffusers_class = "FluxTransformer2DModel"
    published_texts: ClassVar[Mapping[str, Any]] = {"attend_padding": True}

    @property
    def conditions(self) -> Conditions:
        """The states of the text, and its pooled vector, dropped together."""
        width, number, dropout_key = self.pooled_projection_dim, self.pooled_encoder, self.texts.dropout_key
        pooled = PooledText(width, encoder=number, setting="pooled_projection_dim", shared_dropout_key=dropout_key)
        return Conditions(self.texts, pooled)


@dataclass(frozen=True)
class Flux2Config(JointConfig):
    """FLUX.2 (Black Forest Labs 2025); the defaults are those of FLUX.2-dev."""

    num_layers: NumLayers = 8
    num_single_layers: NumLayers = 48
    """Number of blocks after them in which image and text share one set of weights."""
    num_attention_heads: Positive = 48
    joint_attention_dim: Positive = 15360
    in_channels: Positive = 128
    """Channels of the latents: the autoencoder's, in patches of 2 x 2. The network's own patches are 1 x 1."""
    latent_size: tuple[int, int] = (64, 64)
    """[height, width] of these latents; no weight depends on it."""
    axes_dims_rope: tuple[int, int, int, int] = (32, 32, 32, 32)  # type: ignore[assignment]
    """Rotary channels of a head for the image's time, a patch's row and column, and the text position; even."""
    rope_theta: _RopeTheta = 2000.0
    """Base of the frequencies of the positions."""
    mlp_ratio: float = 3.0
    """Width of an MLP's hidden layer, as a multiple of D."""
    timestep_guidance_channels: Positive = 256
    """Width of the sinusoids of time and guidance; even."""
    guidance_embeds: bool = True
    """Take the guidance scale as an input, as guidance-distilled networks do."""
    guidance: _EmbeddedGuidance = GUIDANCE
    """With ``guidance_embeds``: that scale, in training and sampling, 0 to 100."""
    model_id: str = "flux2"

    network = "mindspeed_mm_dit.models.flux2:Flux2"
    adapter = "mindspeed_mm_dit.models.weight_adapters:Flux2Adapter"
    published_sampler = ("euler", 50)
    diffusers_class = "Flux2Transformer2DModel"
    patch_size = 1
    published_texts: ClassVar[Mapping[str, Any]] = {
        "zero_padding": False,
        "cut_padding": False,
        "layers": (9, 18, 27),
        "prompt_template": "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    }
    """For Qwen3, the text encoder of FLUX.2-klein; the defaults of Mistral3Config are those of FLUX.2-dev."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_between("predictor.mlp_ratio", self.mlp_ratio, 1 / self.hidden_size, 1000.0)
        if self.timestep_guidance_channels % 2:
            raise self.error("timestep_guidance_channels", "must be even: half of it is cosines, half sines.")

    @property
    def mlp_width(self) -> int:
        """Width of an MLP's hidden layer."""
        return int(self.hidden_size * self.mlp_ratio)


@dataclass(frozen=True)
class QwenImageConfig(JointConfig):
    """Qwen-Image (Qwen Team 2025); the defaults are the published ones."""

    num_layers: NumLayers = 60
    """Number of blocks."""
    joint_attention_dim: Positive = 3584
    """Width of the text encoder's states; a state that is all zeros is padding, which nothing attends to."""
    axes_dims_rope: tuple[int, int, int] = (16, 56, 56)  # type: ignore[assignment]
    """Rotary channels of a head for the image index, and the row and column of a patch; even."""
    model_id: str = "qwen_image"

    network = "mindspeed_mm_dit.models.qwen_image:QwenImage"
    adapter = "mindspeed_mm_dit.models.weight_adapters:QwenImageAdapter"
    published_sampler = ("euler", 50)
    diffusers_class = "QwenImageTransformer2DModel"


@dataclass(frozen=True)
class ZImageConfig(JointConfig):
    """Z-Image (Z-Image Team 2025); the defaults are the published ones."""

    num_layers: NumLayers = 30
    """Number of blocks of image and text as one sequence."""
    num_refiner_layers: NumLayers = 2
    """Number of blocks of the image alone, and of the text alone, before them."""
    num_attention_heads: Positive = 30
    joint_attention_dim: Positive = 2560
    """Width of the text encoder's states; states at the end that are all zeros are padding."""
    axes_dims_rope: tuple[int, int, int] = (32, 48, 48)  # type: ignore[assignment]
    """Rotary channels of a head for the text position, and the row and column of a patch; even."""
    rope_theta: _RopeTheta = 256.0
    """Base of the frequencies of the positions."""
    model_id: str = "z_image"

    network = "mindspeed_mm_dit.models.z_image:ZImage"
    adapter = "mindspeed_mm_dit.models.weight_adapters:ZImageAdapter"
    published_sampler = ("euler", 50)
    diffusers_class = "ZImageTransformer2DModel"
    data_time = 1

    @property
    def time_width(self) -> int:
        """Width of an embedded time."""
        return min(self.hidden_size, 256)

    @property
    def mlp_width(self) -> int:
        """Width of an MLP's hidden layer."""
        return int(self.hidden_size / 3 * 8)

    def check_context_parallel(self, ranks: int) -> None:
        heads = {"predictor.num_attention_heads": self.num_attention_heads}
        check_shareable(ranks, {**heads, "the padding multiple of texts and images": UNIT})


@dataclass(frozen=True)
class SD3Config(JointConfig):
    """Stable Diffusion 3 and 3.5 (Esser et al. 2024); the defaults are those of SD3-medium."""

    num_layers: NumLayers = 24
    """Number of blocks; in the last, the text is not updated (``context_pre_only``)."""
    num_attention_heads: Positive = 24
    attention_head_dim: Positive = 64
    """Width of a head; times ``num_attention_heads`` it is the width D of a token, a multiple of 4."""
    text_length: Positive = 333
    pooled_projection_dim: Positive = 2048
    """Width of the pooled vectors of the first two text encoders, concatenated."""
    encoder_dropout_prob: Annotated[float, Between(0.0, 0.999)] = 0.0
    """Probability that a training sample loses a text encoder, whose output becomes zeros; separately for each.
    SD3 was trained with 0.464 and works with any of them alone. 0 to below 1."""
    qk_norm: Literal["rms_norm"] | None = None
    """Normalise queries and keys per head, as SD3.5 does; null: not at all."""
    dual_attention_layers: tuple[int, ...] = ()
    """Blocks, counted from 0, in which the image also attends to itself alone (SD3.5-medium)."""
    pos_embed_max_size: Positive = 192
    """Side of the positional table, in patches; latents get a centre crop of it, and cannot be larger."""
    sample_size: Positive = 128
    """Side of the latents at which positions are one apart, in latent pixels; on a larger table they are closer."""
    model_id: str = "sd3"

    network = "mindspeed_mm_dit.models.sd3:SD3"
    adapter = "mindspeed_mm_dit.models.weight_adapters:SD3Adapter"
    diffusers_class = "SD3Transformer2DModel"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_size % 4:
            raise self.error(
                "attention_head_dim",
                f"times {self.num_attention_heads} heads must be a multiple of 4, for the 2-D sin-cos positions.",
            )
        for number in self.dual_attention_layers:
            if not 0 <= number < self.num_layers:
                raise self.error(
                    "dual_attention_layers", f"names block {number}, but blocks are from 0 to {self.num_layers - 1}."
                )

    def _check_latents(self, size: tuple[int, ...], what: str) -> None:
        super()._check_latents(size, what)
        if max(size) > self.patch_size * self.pos_embed_max_size:
            raise ConfigError(
                f"{what} must have at most predictor.pos_embed_max_size = {self.pos_embed_max_size} patches on a side."
            )

    def reduced_width(self) -> SD3Config:
        """Return the same network with at most 4 heads and blocks; the same fraction of blocks has dual attention."""
        layers = min(self.num_layers, 4)
        dual = tuple(sorted({number * layers // self.num_layers for number in self.dual_attention_layers}))
        return JointConfig.reduced_width(dataclasses.replace(self, dual_attention_layers=dual))  # type: ignore[return-value]

    @property
    def conditions(self) -> Conditions:
        """The outputs of CLIP, a larger CLIP and T5 as one condition."""
        widths = self.joint_attention_dim, self.pooled_projection_dim
        return Conditions(JoinedText(self.text_length, *widths, self.encoder_dropout_prob))
