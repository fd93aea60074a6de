"""Qwen-Image (Qwen Team 2025), which loads the weights of diffusers' QwenImageTransformer2DModel by name.

Letters: B batch, C channels, H W height and width of latents, h w the same in patches of 2 x 2, N = h w tokens of the
image, L of the text, D width of a token, d of a head, c the condition (B, D).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.joint import QwenImageConfig
from mindspeed_mm_dit.configs.predictor import ZEROS
from mindspeed_mm_dit.framework import nn, ops
from mindspeed_mm_dit.models.joint import (
    EPS,
    AdaLayerNormContinuous,
    JointAttention,
    TimeTextEmbedding,
    add_residual,
    nonzero_mask,
    pack,
    pad_to_multiple,
    plain_norm,
    prefix_mask,
    unpack,
)
from mindspeed_mm_dit.models.layers import FeedForward, modulate
from mindspeed_mm_dit.models.positions import grid_positions, rotary_at_positions

Tensor = Any  # a tensor of the active framework


def token_positions(L: int, grids: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return the position of each token of a text, then of images of ``grids`` (h, w) in patches, (L + N, 3).

    An image is at (its number, row, column), counted from its centre; the text starts after the largest image, on all
    three axes.
    """
    images = [grid_positions(h, w) + np.array([number, h // 2 - h, w // 2 - w]) for number, (h, w) in enumerate(grids)]
    first = max(side // 2 for grid in grids for side in grid)
    text = np.repeat(first + np.arange(L)[:, None], 3, 1)
    return np.concatenate([text, *images])


@ops.from_host(lambda i, j, k, L, h, w: (2, L + h * w, (i + j + k) // 2))
def rotary_positions(i: int, j: int, k: int, L: int, h: int, w: int) -> np.ndarray:
    """Return rotary cosines, then sines, of a text and one image, (2, L + N, d / 2); i, j, k: channels of each axis."""
    return rotary_at_positions(token_positions(L, [(h, w)]), (i, j, k))


class QwenImageBlock(nn.Module):
    """Attention of image and text to both, then an MLP for each; the condition sets shift, scale and gate of all."""

    def __init__(self, width: int, num_heads: int, is_last: bool) -> None:
        super().__init__()
        self.img_mod = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width, init=ZEROS, matrices=6))
        self.img_norm1, self.img_norm2 = plain_norm(width), plain_norm(width)
        self.attn = JointAttention(width, num_heads)
        self.img_mlp = FeedForward(width, 4 * width, width)
        self.txt_mod = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width, init=ZEROS, matrices=6))
        self.txt_norm1, self.txt_norm2 = plain_norm(width), plain_norm(width)
        self.txt_mlp = FeedForward(width, 4 * width, width)
        if is_last:
            self.attn.end_text()
            nn.freeze_parameters(self.attn.to_add_out)
            nn.freeze_parameters(self.txt_mlp)

    def forward(
        self, text: Tensor, x: Tensor, c: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return text (B, L, D) and image (B, N, D)."""
        image, words = ops.chunk(self.img_mod(c), 6, 1), ops.chunk(self.txt_mod(c), 6, 1)  # 6 x (B, D): shift, scale...
        normed = modulate(self.img_norm1(x), image[0], image[1])  # (B, N, D)
        text_normed = modulate(self.txt_norm1(text), words[0], words[1])  # (B, L, D)
        attended, text_attended = self.attn(normed, text_normed, cos, sin, mask)  # (B, N, D), (B, L, D)
        x = add_residual(x, attended, image, self.img_norm2, self.img_mlp)  # (B, N, D)
        return add_residual(text, text_attended, words, self.txt_norm2, self.txt_mlp), x


class QwenImage(nn.Module):
    """The predictor: maps noised latents, time and text to the velocity towards noise."""

    def __init__(self, config: QwenImageConfig) -> None:
        super().__init__()
        self.config = config
        D, heads, last = config.hidden_size, config.num_attention_heads, config.num_layers - 1
        self.time_text_embed = TimeTextEmbedding(D)
        self.txt_norm = nn.RMSNorm(config.joint_attention_dim, eps=EPS)
        self.img_in = nn.Linear(4 * config.in_channels, D)
        self.txt_in = nn.Linear(config.joint_attention_dim, D)
        self.transformer_blocks = nn.Blocks([QwenImageBlock(D, heads, i == last) for i in range(last + 1)])
        self.norm_out = AdaLayerNormContinuous(D)
        self.proj_out = nn.Linear(D, 4 * config.in_channels, init=ZEROS, matrices=0)

    def forward(self, x: Tensor, t: Tensor, text: Tensor, mask: Tensor | None = None) -> Tensor:
        """Predict.

        x: (B, C, H, W) noised latents of even sides; t: (B,) times from 0 (data) to 1 (noise); text: (B, L,
        joint_attention_dim); mask: (B, L) bool, false for states to leave out, instead of those that are all zeros.
        Returns (B, C, H, W) in the dtype of the weights.
        """
        text, h, w = pad_to_multiple(text), x.shape[2] // 2, x.shape[3] // 2
        i, j, k = self.config.axes_dims_rope
        tables = rotary_positions(i, j, k, text.shape[1], h, w)  # (2, L + N, d / 2)
        mask = nonzero_mask(text) if mask is None else mask
        return unpack(self.tokens(pack(x), t, text, mask, tables[0], tables[1]), h, w)  # (B, C, H, W)

    def tokens(self, x: Tensor, t: Tensor, text: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Do the same for tokens (B, N, 4 C) at any positions."""
        B, N, _ = x.shape
        mask = ops.cat([mask, ops.broadcast_to(prefix_mask(N, N), (B, N))], 1)[:, None, None]  # (B, 1, 1, L + N)
        c = self.time_text_embed(t)  # (B, D)
        x = ops.split_tokens(self.img_in(ops.cast_like(x, self.img_in.weight)))  # (B, N, D)
        text = ops.split_tokens(self.txt_in(self.txt_norm(ops.cast_like(text, self.txt_in.weight))))  # (B, L, D)
        for block in self.transformer_blocks:
            text, x = block(text, x, c, cos, sin, mask)  # (B, L, D), (B, N, D)
        return ops.gather_tokens(self.proj_out(self.norm_out(x, c)))  # (B, N, 4 C)
