"""The CustomDiT of MindSpeed-MM's tutorial "develop a new model": Wan's layers in another order."""

from __future__ import annotations

from typing import Any

from mindspeed_mm_dit.configs.custom_dit import CustomDiTConfig
from mindspeed_mm_dit.models.wan_layers import VideoBlock, VideoTransformer

Tensor = Any  # a tensor of the active framework


class CustomDiTBlock(VideoBlock):
    """Modulated norms have weights; what self-attention was given looks at the text too."""

    def __init__(self, config: CustomDiTConfig) -> None:
        super().__init__(config, affine=True)

    def asking(self, x: Tensor, normed: Tensor) -> Tensor:
        return normed


class CustomDiT(VideoTransformer):
    """The tutorial's transformer."""

    def __init__(self, config: CustomDiTConfig) -> None:
        super().__init__(config, CustomDiTBlock)
