"""Wan 2.1 text-to-video (Wan Team 2025), as diffusers' WanTransformer3DModel, whose weights it takes by name."""

from __future__ import annotations

from typing import Any

from mindspeed_mm_dit.configs.wan import WanConfig
from mindspeed_mm_dit.framework import nn
from mindspeed_mm_dit.models.wan_layers import VideoBlock, VideoTransformer

Tensor = Any  # a tensor of the active framework


class WanBlock(VideoBlock):
    """Modulated norms have no weights; the tokens look at the text through a norm of its own that has."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__(config, affine=False)
        self.norm2 = nn.LayerNorm(config.hidden_size, eps=config.eps, elementwise_affine=True)

    def asking(self, x: Tensor, normed: Tensor) -> Tensor:
        return self.norm2(x)


class Wan(VideoTransformer):
    """Wan's transformer."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__(config, WanBlock)
