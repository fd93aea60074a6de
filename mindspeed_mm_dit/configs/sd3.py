"""Section ``predictor`` of model.json with ``model_id`` "sd3"."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from mindspeed_mm_dit.configs.condition import Conditions, JoinedText
from mindspeed_mm_dit.configs.joint import JointConfig, without_fixed
from mindspeed_mm_dit.configs.limits import check_between, require_positive
from mindspeed_mm_dit.configs.predictor import Shape, count_of, shape_of
from mindspeed_mm_dit.errors import ConfigError


@dataclass(frozen=True)
class SD3Config(JointConfig):
    """Stable Diffusion 3 and 3.5 (Esser et al. 2024); the defaults are those of SD3-medium."""

    num_layers: int = 24
    """Number of blocks; in the last, the text is not updated (``context_pre_only``)."""
    num_attention_heads: int = 24
    attention_head_dim: int = 64
    """Width of a head; times ``num_attention_heads`` it is the width D of a token, a multiple of 4."""
    text_length: int = 333
    pooled_projection_dim: int = 2048
    """Width of the pooled vectors of the first two text encoders, concatenated."""
    encoder_dropout_prob: float = 0.0
    """Probability that a training sample loses a text encoder, whose output becomes zeros; separately for each.
    SD3 was trained with 0.464 and works with any of them alone. 0 to below 1."""
    qk_norm: Literal["rms_norm"] | None = None
    """Normalise queries and keys per head, as SD3.5 does; null: not at all."""
    dual_attention_layers: tuple[int, ...] = ()
    """Blocks, counted from 0, in which the image also attends to itself alone (SD3.5-medium)."""
    pos_embed_max_size: int = 192
    """Side of the positional table, in patches; latents get a centre crop of it, and cannot be larger."""
    sample_size: int = 128
    """Side of the latents at which positions are one apart, in latent pixels; on a larger table they are closer."""
    model_id: str = "sd3"

    network = "mindspeed_mm_dit.models.sd3:SD3"
    diffusers_class = "SD3Transformer2DModel"
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {"patch_size": (2,)}
    token_channels = 1
    adaptable = (*JointConfig.adaptable, "encoder_dropout_prob")  # type: ignore[assignment]

    def __post_init__(self) -> None:
        require_positive(self, "predictor", "pooled_projection_dim", "pos_embed_max_size", "sample_size")
        check_between("predictor.encoder_dropout_prob", self.encoder_dropout_prob, 0.0, 0.999)
        super().__post_init__()
        if self.hidden_size % 4:
            what = f"predictor.attention_head_dim = {self.attention_head_dim}"
            raise ConfigError(what, f"times {self.num_attention_heads} heads must be a multiple of 4, for positions")
        for number in self.dual_attention_layers:
            if not 0 <= number < self.num_layers:
                what = f"predictor.dual_attention_layers = {list(self.dual_attention_layers)}"
                raise ConfigError(what, f"names block {number}, but the {self.num_layers} blocks are counted from 0")

    def _check_latents(self, size: tuple[int, ...], what: str) -> None:
        super()._check_latents(size, what)
        if max(size) > self.patch_size * self.pos_embed_max_size:
            raise ConfigError(
                what, f"exceed predictor.pos_embed_max_size = {self.pos_embed_max_size} patches on a side"
            )

    def reduced_width(self) -> SD3Config:
        """Return the same network with at most 4 heads and blocks; the same fraction of blocks has dual attention."""
        layers = min(self.num_layers, 4)
        dual = tuple(sorted({number * layers // self.num_layers for number in self.dual_attention_layers}))
        return JointConfig.reduced_width(replace(self, dual_attention_layers=dual))  # type: ignore[return-value]

    @property
    def defaults_for_missing(self) -> tuple[str, ...]:
        return () if self.qk_norm else ("num_attention_heads", "attention_head_dim")

    @property
    def conditions(self) -> Conditions:
        """The outputs of CLIP, a larger CLIP and T5 as one condition."""
        widths = self.joint_attention_dim, self.pooled_projection_dim
        return Conditions(JoinedText(self.text_length, *widths, self.encoder_dropout_prob))

    @classmethod
    def of_diffusers(cls, section: Mapping[str, Any]) -> dict[str, Any]:
        settings = super().of_diffusers(section)
        width = settings.get("num_attention_heads", 0) * settings.get("attention_head_dim", 0)
        repeated = {"out_channels": (settings["in_channels"],), "caption_projection_dim": (width,)}
        side = min(
            settings.get("sample_size", cls.sample_size), cls.patch_size * settings.get("pos_embed_max_size", 96)
        )
        settings["latent_size"] = [side, side]
        return without_fixed(settings, repeated)

    def to_diffusers(self) -> dict[str, Any]:
        return super().to_diffusers() | {"out_channels": self.in_channels, "caption_projection_dim": self.hidden_size}

    @classmethod
    def of_shapes(cls, shapes: Mapping[str, Shape]) -> SD3Config | None:
        """Return the architecture that ``shapes`` imply, with heads of the published width without QK-norm."""
        if "pos_embed.pos_embed" not in shapes or "transformer_blocks.0.norm1_context.linear.weight" not in shapes:
            return None
        D, channels, *_ = shape_of(shapes, "pos_embed.proj.weight", 4)
        norm, numbers = "transformer_blocks.0.attn.norm_q.weight", range(count_of(shapes, "transformer_blocks"))
        usual = cls.attention_head_dim if D % cls.attention_head_dim == 0 else D
        head_dim = shape_of(shapes, norm, 1)[0] if norm in shapes else usual
        side = math.isqrt(shape_of(shapes, "pos_embed.pos_embed", 3)[1])
        return cls(
            num_layers=len(numbers), num_attention_heads=D // head_dim, attention_head_dim=head_dim,
            joint_attention_dim=shape_of(shapes, "context_embedder.weight", 2)[1], in_channels=channels,
            pooled_projection_dim=shape_of(shapes, "time_text_embed.text_embedder.linear_1.weight", 2)[1],
            qk_norm="rms_norm" if norm in shapes else None, pos_embed_max_size=side,
            dual_attention_layers=tuple(i for i in numbers if f"transformer_blocks.{i}.attn2.to_q.weight" in shapes),
            latent_size=(min(cls.latent_size[0], cls.patch_size * side),) * 2,
        )  # fmt: skip
