"""FLUX.1 (Black Forest Labs 2024), which loads the weights of diffusers' FluxTransformer2DModel by name.

Blocks of joint attention with separate weights for image and text, then blocks in which both use the same weights.
Letters: B batch, C channels, H W height and width of latents, h w the same in patches of 2 x 2, N = h w tokens of the
image, L of the text, D width of a token, d of a head, c the condition (B, D).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.joint import FluxConfig
from mindspeed_mm_dit.configs.predictor import ZEROS
from mindspeed_mm_dit.framework import nn, ops
from mindspeed_mm_dit.models.joint import (
    AdaLayerNormContinuous,
    AdaLayerNormZero,
    Attention,
    JointBlock,
    TimeTextEmbedding,
    add_gated,
    concat_tokens,
    image_tokens,
    pack,
    pad_to_multiple,
    padding_mask,
    unpack,
)
from mindspeed_mm_dit.models.positions import grid_positions, rotary_at_positions

Tensor = Any  # a tensor of the active framework


@ops.from_host(lambda i, j, k, L, h, w: (2, L + h * w, (i + j + k) // 2))
def rotary_positions(i: int, j: int, k: int, L: int, h: int, w: int) -> np.ndarray:
    """Return rotary cosines, then sines, of a text, all at position 0, and of an image, (2, L + N, d / 2).

    Of a head, ``i`` channels rotate with a constant 0, ``j`` with the row and ``k`` with the column.
    """
    return rotary_at_positions(np.concatenate([np.zeros((L, 3)), grid_positions(h, w)]), (i, j, k))


class SingleBlock(nn.Module):
    """Attention and MLP side by side, of text and image as one sequence."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.norm = AdaLayerNormZero(width, 3)
        self.proj_mlp = nn.Linear(width, 4 * width)
        self.act_mlp = nn.GELU(approximate="tanh")
        self.proj_out = nn.Linear(5 * width, width)
        self.attn = Attention(width, num_heads, out=False)

    def forward(self, x: Tensor, c: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return text and image, (B, L + N, D)."""
        normed, gate = self.norm(x, c)  # (B, L + N, D), (B, D)
        both = [self.attn(normed, cos, sin, mask), self.act_mlp(self.proj_mlp(normed))]
        return add_gated(x, gate, self.proj_out(ops.cat(both, 2)))


class Flux(nn.Module):
    """The predictor: maps noised latents, time, text and its pooled vector to the velocity towards noise."""

    def __init__(self, config: FluxConfig) -> None:
        super().__init__()
        self.config = config
        D, heads, channels = config.hidden_size, config.num_attention_heads, 4 * config.in_channels
        self.time_text_embed = TimeTextEmbedding(D, config.pooled_projection_dim, config.guidance_embeds)
        self.context_embedder = nn.Linear(config.joint_attention_dim, D)
        self.x_embedder = nn.Linear(channels, D)
        self.transformer_blocks = nn.Blocks([JointBlock(D, heads) for _ in range(config.num_layers)])
        self.single_transformer_blocks = nn.Blocks([SingleBlock(D, heads) for _ in range(config.num_single_layers)])
        self.norm_out = AdaLayerNormContinuous(D)
        self.proj_out = nn.Linear(D, channels, init=ZEROS, matrices=0)
        nn.set_constant(self, "guidance", (1,), lambda: np.array([config.guidance], np.float32))

    def forward(self, x: Tensor, t: Tensor, text: Tensor, pooled: Tensor, guidance: Tensor | None = None) -> Tensor:
        """Predict.

        x: (B, C, H, W) noised latents of even sides; t: (B,) times from 0 (data) to 1 (noise); text: (B, L,
        joint_attention_dim), with attention to all states; pooled: (B, pooled_projection_dim); guidance: (B,), instead
        of ``config.guidance``. Returns (B, C, H, W) in the dtype of the weights.
        """
        h, w = x.shape[2] // 2, x.shape[3] // 2
        L, text = text.shape[1], pad_to_multiple(text)
        cos, sin = self.positions(text.shape[1], h, w)  # 2 x (L + N, d / 2)
        mask = padding_mask(L, text.shape[1], h * w)  # (1, 1, 1, L + N)
        return unpack(self.tokens(pack(x), t, text, pooled, cos, sin, guidance, mask), h, w)  # (B, C, H, W)

    def positions(self, L: int, h: int, w: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the positions of L tokens of text, then of an image, each (L + N, d / 2)."""
        i, j, k = self.config.axes_dims_rope
        tables = rotary_positions(i, j, k, L, h, w)
        return tables[0], tables[1]

    def tokens(
        self,
        x: Tensor,
        t: Tensor,
        text: Tensor,
        pooled: Tensor,
        cos: Tensor,
        sin: Tensor,
        guidance: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Do the same for tokens (B, N, 4 C) at any positions; mask: as in :class:`JointAttention`."""
        c = self.time_text_embed(t, pooled, self.guidance if guidance is None else guidance)  # (B, D)
        L = text.shape[1]
        x = ops.split_tokens(self.x_embedder(ops.cast_like(x, self.x_embedder.weight)))  # (B, N, D)
        text = ops.split_tokens(self.context_embedder(ops.cast_like(text, self.context_embedder.weight)))  # (B, L, D)
        for block in self.transformer_blocks:
            text, x = block(text, x, c, cos, sin, mask)  # (B, L, D), (B, N, D)
        x = concat_tokens(text, x)  # (B, L + N, D)
        for block in self.single_transformer_blocks:
            x = block(x, c, cos, sin, mask)  # (B, L + N, D)
        return ops.gather_tokens(self.proj_out(self.norm_out(image_tokens(x, L), c)))  # (B, N, 4 C)
