"""Section ``predictor`` of model.json with ``model_id`` "wan"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mindspeed_mm_dit.configs.video_transformer import VideoTransformerConfig
from mindspeed_mm_dit.errors import ConfigError


@dataclass(frozen=True)
class WanConfig(VideoTransformerConfig):
    """Wan 2.1 text-to-video (Wan Team 2025), with the keys of a published ``transformer/config.json``.

    The defaults are those of the 14B model.
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
    image_dim: None = None
    """For image-to-video, which is not supported; must be null."""
    added_kv_proj_dim: None = None
    """For image-to-video, which is not supported; must be null."""
    pos_embed_seq_len: None = None
    """For image-to-video, which is not supported; must be null."""
    model_id: str = "wan"
    """Names this kind of network."""

    heads_key, head_dim_key = "num_attention_heads", "attention_head_dim"
    network = "mindspeed_mm_dit.models.video_transformer:Wan"
    affine_norms = ("norm2",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.cross_attn_norm:
            raise ConfigError(
                "predictor.cross_attn_norm = false",
                "all published text-to-video networks of Wan have that norm, and only those are supported",
                "set it to true",
            )

    @property
    def num_heads(self) -> int:  # type: ignore[override]
        """Number of attention heads."""
        return self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.attention_head_dim
