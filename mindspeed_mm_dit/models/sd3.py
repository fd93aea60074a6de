"""Stable Diffusion 3 and 3.5 (Esser et al. 2024), which load the weights of diffusers' SD3Transformer2DModel by name.

Letters: B batch, C channels, H W height and width of latents, h w the same in patches, P patch, N = h w tokens of the
image, L of the text, D width of a token, c the condition (B, D).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.joint import SD3Config
from mindspeed_mm_dit.configs.predictor import ZEROS
from mindspeed_mm_dit.framework import nn, ops
from mindspeed_mm_dit.models.joint import (
    AdaLayerNormContinuous,
    JointBlock,
    TimeTextEmbedding,
    pad_to_multiple,
    padding_mask,
)
from mindspeed_mm_dit.models.layers import to_tokens, unpatchify
from mindspeed_mm_dit.models.positions import sincos_positions_2d

Tensor = Any  # a tensor of the active framework


class PositionedPatchEmbed(nn.Module):
    """Cut latents into patches, embed each as a token, and add positions cropped from the centre of a table."""

    def __init__(self, config: SD3Config) -> None:
        super().__init__()
        P, D, most = config.patch_size, config.hidden_size, config.pos_embed_max_size
        self.most = most

        def table(draw: Any, shape: tuple[int, ...]) -> np.ndarray:
            return sincos_positions_2d(D, config.sample_size // P, (most, most))[None]

        self.proj = nn.Conv2d(config.in_channels, D, kernel_size=P, stride=P)
        self.pos_embed = nn.parameter((1, most**2, D), table, trained=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(ops.cast_like(x, self.proj.weight))  # (B, D, h, w)
        return to_tokens(x) + ops.cast_like(self.cropped(x.shape[2], x.shape[3]), x)  # (B, N, D)

    def cropped(self, h: int, w: int) -> Tensor:
        """Return the positions of h x w patches, (1, N, D)."""
        top, left = (self.most - h) // 2, (self.most - w) // 2
        table = ops.reshape(self.pos_embed, (1, self.most, self.most, -1))  # (1, most, most, D)
        return ops.reshape(table[:, top : top + h, left : left + w], (1, h * w, -1))


class SD3(nn.Module):
    """The predictor: maps noised latents, time, text and its pooled vector to the velocity towards noise."""

    def __init__(self, config: SD3Config) -> None:
        super().__init__()
        self.config = config
        D, heads, last = config.hidden_size, config.num_attention_heads, config.num_layers - 1
        self.pos_embed = PositionedPatchEmbed(config)
        self.time_text_embed = TimeTextEmbedding(D, config.pooled_projection_dim)
        self.context_embedder = nn.Linear(config.joint_attention_dim, D)
        self.transformer_blocks = nn.Blocks([
            JointBlock(D, heads, config.qk_norm is not None, number == last, number in config.dual_attention_layers)
            for number in range(config.num_layers)
        ])  # fmt: skip
        self.norm_out = AdaLayerNormContinuous(D)
        self.proj_out = nn.Linear(D, config.patch_size**2 * config.in_channels, init=ZEROS, matrices=0)

    def forward(self, x: Tensor, t: Tensor, text: Tensor, pooled: Tensor) -> Tensor:
        """Predict.

        x: (B, C, H, W) noised latents of even sides; t: (B,) times from 0 (data) to 1 (noise), in diffusers 1000 times
        as large; text: (B, L, joint_attention_dim), with attention to all states; pooled: (B, pooled_projection_dim).
        Returns (B, C, H, W) in the dtype of the weights.
        """
        P = self.config.patch_size
        h, w = x.shape[2] // P, x.shape[3] // P
        x = ops.split_tokens(self.pos_embed(x))  # (B, N, D)
        c = self.time_text_embed(t, pooled)  # (B, D)
        L, text = text.shape[1], pad_to_multiple(text)
        mask = padding_mask(L, text.shape[1], h * w)  # (1, 1, 1, L + N)
        text = ops.split_tokens(self.context_embedder(ops.cast_like(text, self.context_embedder.weight)))  # (B, L, D)
        for block in self.transformer_blocks:
            text, x = block(text, x, c, mask=mask)  # (B, L, D), (B, N, D)
        return unpatchify(ops.gather_tokens(self.proj_out(self.norm_out(x, c))), (h, w), P)  # (B, C, H, W)
