"""Section ``predictor`` for transformers with joint attention, where text and image attend to each other.

"qwen_image" is one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from mindspeed_mm_dit.configs.condition import Conditions, TextStates
from mindspeed_mm_dit.configs.limits import MOST_LAYERS, check_between, require_positive, short_repr
from mindspeed_mm_dit.configs.predictor import PredictorConfig, Shape, check_shareable, count_of, shape_of
from mindspeed_mm_dit.errors import ConfigError


def without_fixed(section: Mapping[str, Any], fixed: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Return ``section`` without the keys of ``fixed``; raises ConfigError if one has another value than those."""
    for key, values in fixed.items():
        if key in section and section[key] not in values:
            words = " or ".join(map(short_repr, values))
            raise ConfigError(f"{key} = {short_repr(section[key])}", f"is not supported, only {words}")
    return {key: value for key, value in section.items() if key not in fixed}


@dataclasses.dataclass(frozen=True)
class JointConfig(PredictorConfig):
    """Base of the model families, with the keys of a published ``transformer/config.json``; each has its own defaults.

    ``in_channels`` counts channels of latents; a token has four times as many.
    """

    num_layers: int = 19
    """Number of blocks with separate weights for image and text."""
    num_attention_heads: int = 24
    """Number of attention heads."""
    attention_head_dim: int = 128
    """Width of a head; times ``num_attention_heads`` it is the width D of a token."""
    joint_attention_dim: int = 4096
    """Width of the text encoder's states."""
    in_channels: int = 16
    """Channels of the latents."""
    text_length: int = 512
    """Tokens of a text with its padding. Only estimates of arithmetic and memory use it; no weight depends on it."""
    latent_size: tuple[int, int] = (128, 128)
    """[height, width] of the latents in latent pixels; no weight depends on it."""

    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Further keys of diffusers' config.json -> the values that are supported."""
    published_texts: ClassVar[Mapping[str, Any]] = {}
    """Published settings of the first text encoder."""
    token_channels: ClassVar[int] = 4
    """Channels of a token in diffusers' config.json for each channel of the latents."""
    data_time = 0
    published_sampler = ("euler", 28)
    patch_size = 2
    adaptable = ("text_length", "latent_size")
    rope_theta = 10000.0  # a key of some model families
    num_classes = 0  # only texts are conditions
    class_dropout_prob = 0.0
    z_dims = ()

    def __post_init__(self) -> None:
        counts = ("num_attention_heads", "attention_head_dim", "joint_attention_dim", "in_channels", "text_length")
        require_positive(self, "predictor", *counts)
        check_between("predictor.num_layers", self.num_layers, 1, MOST_LAYERS)
        self._check_latents(self.latent_size, f"predictor.latent_size = {list(self.latent_size)}")

    def _check_latents(self, size: tuple[int, ...], what: str) -> None:
        if len(size) != 2 or min(size) < 1 or any(side % self.patch_size for side in size):
            raise ConfigError(what, f"height and width of latents must be positive multiples of {self.patch_size}")

    def check_rotary_axes(self, key: str, widths: tuple[int, ...]) -> None:
        """Raise ConfigError unless ``widths``, the rotary channels of each axis, are even and add up to a head."""
        if min(widths, default=0) < 2 or any(width % 2 for width in widths) or sum(widths) != self.head_dim:
            raise ConfigError(
                f"predictor.{key} = {list(widths)}",
                f"must be even numbers whose sum is the width of a head, {self.head_dim}",
            )

    def resized(self, shape: Shape) -> JointConfig:
        if len(shape) != 3 or shape[0] != self.in_channels:
            return super().resized(shape)  # type: ignore[return-value]
        self._check_latents(shape[1:], f"latents of shape {shape}")
        return dataclasses.replace(self, latent_size=shape[1:])  # type: ignore[arg-type]

    def reduced_width(self) -> JointConfig:
        """Return the same network with at most 4 heads of the same width, and at most 4 blocks of each kind."""
        layers = {name: min(getattr(self, name), 4) for name in self._counts_of_blocks()}
        return dataclasses.replace(self, num_attention_heads=min(self.num_attention_heads, 4), **layers)  # type: ignore[arg-type]

    def check_context_parallel(self, ranks: int) -> None:
        check_shareable(
            ranks, {"predictor.num_attention_heads": self.num_attention_heads, "tokens of an image": self.num_tokens}
        )

    @classmethod
    def _counts_of_blocks(cls) -> list[str]:
        names = [field.name for field in dataclasses.fields(cls)]
        return [name for name in names if name.startswith("num_") and name.endswith("_layers")]

    @property
    def num_heads(self) -> int:  # type: ignore[override]
        """Number of attention heads."""
        return self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.attention_head_dim

    @property
    def defaults_for_missing(self) -> tuple[str, ...]:
        is_unpublished_width = hasattr(self, "axes_dims_rope") and self.head_dim != type(self).attention_head_dim
        return ("axes_dims_rope",) if is_unpublished_width else ()

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
        return TextStates(
            self.text_length, self.joint_attention_dim, setting="joint_attention_dim", as_published=self.published_texts
        )

    @property
    def conditions(self) -> Conditions:
        return Conditions(self.texts)

    @classmethod
    def of_diffusers(cls, section: Mapping[str, Any]) -> dict[str, Any]:
        """Return section ``predictor`` for the config.json of a diffusers folder.

        There ``in_channels`` counts channels of a token. Unknown keys stay, so that reading the section refuses them.
        Raises ConfigError for an unsupported value of a key in ``fixed``.
        """
        settings = without_fixed({key: value for key, value in section.items() if not key.startswith("_")}, cls.fixed)
        return {**settings, "in_channels": settings["in_channels"] // cls.token_channels}

    def to_diffusers(self) -> dict[str, Any]:
        """Return the config.json of a diffusers folder (the inverse of :meth:`of_diffusers`)."""
        ours = (*self.adaptable, "model_id")
        settings = {key: value for key, value in dataclasses.asdict(self).items() if key not in ours}
        # (where the first value is None, diffusers' default applies)
        fixed = {key: values[0] for key, values in self.fixed.items() if values[0]}
        return {
            "_class_name": self.diffusers_class, **settings, **fixed,
            "in_channels": self.in_channels * self.token_channels,
        }  # fmt: skip

    @classmethod
    def published_rotary_axes(cls, head_dim: int) -> tuple[int, ...]:
        """Return ``axes_dims_rope`` for heads of another width, in the published proportions."""
        published: tuple[int, ...] = cls.axes_dims_rope  # type: ignore[attr-defined]
        first = [max(2, head_dim * width // sum(published) // 2 * 2) for width in published[:-1]]
        return (*first, head_dim - sum(first))


@dataclass(frozen=True)
class QwenImageConfig(JointConfig):
    """Qwen-Image (Qwen Team 2025); the defaults are the published ones."""

    num_layers: int = 60
    """Number of blocks."""
    joint_attention_dim: int = 3584
    """Width of the text encoder's states; a state that is all zeros is padding, which nothing attends to."""
    axes_dims_rope: tuple[int, int, int] = (16, 56, 56)
    """Rotary channels of a head for the image index, and the row and column of a patch; even."""
    model_id: str = "qwen_image"

    network = "mindspeed_mm_dit.models.qwen_image:QwenImage"
    published_sampler = ("euler", 50)
    diffusers_class = "QwenImageTransformer2DModel"
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "patch_size": (2,), "guidance_embeds": (False,), "zero_cond_t": (False,), "use_layer3d_rope": (False,),
        "use_additional_t_cond": (False,), "pooled_projection_dim": (None, 768),
    }  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_rotary_axes("axes_dims_rope", self.axes_dims_rope)

    @classmethod
    def of_diffusers(cls, section: Mapping[str, Any]) -> dict[str, Any]:
        settings = super().of_diffusers(section)
        return without_fixed(settings, {"out_channels": (settings["in_channels"],)})

    def to_diffusers(self) -> dict[str, Any]:
        return super().to_diffusers() | {"out_channels": self.in_channels}

    @classmethod
    def of_shapes(cls, shapes: Mapping[str, Shape]) -> QwenImageConfig | None:
        """Return the architecture that ``shapes`` imply, with the published proportions of rotary axes."""
        if "transformer_blocks.0.txt_mod.1.weight" not in shapes:
            return None
        D, channels = shape_of(shapes, "img_in.weight", 2)
        (head_dim,) = shape_of(shapes, "transformer_blocks.0.attn.norm_q.weight", 1)
        return cls(
            num_layers=count_of(shapes, "transformer_blocks"), num_attention_heads=D // head_dim,
            attention_head_dim=head_dim, joint_attention_dim=shape_of(shapes, "txt_in.weight", 2)[1],
            in_channels=channels // 4, axes_dims_rope=cls.published_rotary_axes(head_dim),  # type: ignore[arg-type]
        )  # fmt: skip
