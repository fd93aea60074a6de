"""Section ``predictor`` of model.json with ``model_id`` "wan"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mindspeed_mm_dit.configs.video_transformer import VideoTransformerConfig
from mindspeed_mm_dit.errors import ConfigError


@dataclass(frozen=True)
class WanConfig(VideoTransformerConfig):
    """Wan 2.1 text-to-video (Wan Team 2025), under the keys of a published ``transformer/config.json``; those of the
    14B model are the defaults."""

    num_attention_heads: int = 40
    """Attention heads."""
    attention_head_dim: int = 128
    """Width of a head; with ``num_attention_heads`` the width D of a token."""
    text_dim: int = 4096
    """Width of the text encoder's states."""
    eps: float = 1e-6
    """Of all norms."""
    cross_attn_norm: bool = True
    """A norm before cross attention; the published networks have it, and so does this one."""
    qk_norm: Literal["rms_norm_across_heads"] = "rms_norm_across_heads"
    """Queries and keys are normed over the whole width, before they are split into heads."""
    image_dim: None = None
    """Of image-to-video, which is not offered."""
    added_kv_proj_dim: None = None
    """Of image-to-video, which is not offered."""
    pos_embed_seq_len: None = None
    """Of image-to-video, which is not offered."""
    model_id: str = "wan"
    """Key in PREDICTOR_MODEL_MAPPINGS."""

    heads_key, head_dim_key = "num_attention_heads", "attention_head_dim"
    affine_norms = ("norm2",)
    kept_norms = 6

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.cross_attn_norm:
            raise ConfigError(
                "predictor.cross_attn_norm = false",
                "no published text-to-video network of Wan is without that norm, and none is built here",
                "set it to true",
            )

    @property
    def num_heads(self) -> int:  # type: ignore[override]
        """Attention heads."""
        return self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.attention_head_dim
