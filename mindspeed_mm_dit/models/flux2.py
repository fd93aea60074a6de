"""FLUX.2 (Black Forest Labs 2025), which loads the weights of diffusers' Flux2Transformer2DModel by name.

FLUX.1 with one modulation for all blocks of a kind, gated MLPs, no biases and no pooled text. Letters: B batch, C
channels of latents, h w their height and width, N = h w tokens of the image, L of the text, D width of a token, M of an
MLP's hidden layer, d of a head, c the condition (B, D).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.joint import Flux2Config
from mindspeed_mm_dit.configs.predictor import ZEROS
from mindspeed_mm_dit.framework import nn, ops
from mindspeed_mm_dit.models.joint import (
    EPS,
    AdaLayerNormContinuous,
    JointAttention,
    TimeTextEmbedding,
    add_gated,
    add_residual,
    concat_tokens,
    image_tokens,
    pad_to_multiple,
    padding_mask,
    plain_norm,
)
from mindspeed_mm_dit.models.layers import merge_heads, modulate, self_attention, split_heads, to_tokens
from mindspeed_mm_dit.models.positions import grid_positions, rotary_at_positions

Tensor = Any  # a tensor of the active framework


def token_positions(L: int, h: int, w: int) -> np.ndarray:
    """Return the position of each token of a text, (0, 0, 0, index), and an image, (0, row, column, 0): (L + N, 4)."""
    text, image = np.zeros((L, 4)), np.zeros((h * w, 4))
    text[:, 3], image[:, :3] = np.arange(L), grid_positions(h, w)
    return np.concatenate([text, image])


@ops.from_host(lambda i, j, k, m, theta, L, h, w: (2, L + h * w, (i + j + k + m) // 2))
def rotary_positions(i: int, j: int, k: int, m: int, theta: float, L: int, h: int, w: int) -> np.ndarray:
    """Return rotary cosines, then sines, of text and image, (2, L + N, d / 2); i, j, k, m: channels of the axes."""
    return rotary_at_positions(token_positions(L, h, w), (i, j, k, m), theta)


class Modulation(nn.Module):
    """Shifts, scales and gates that all blocks of a kind share."""

    def __init__(self, width: int, parts: int) -> None:
        super().__init__()
        self.act = nn.SiLU()
        self.linear = nn.Linear(width, parts * width, bias=False, init=ZEROS, matrices=parts)

    def forward(self, c: Tensor) -> Tensor:
        return self.linear(self.act(c))  # (B, parts x D)


class GatedMlp(nn.Module):
    """An MLP whose one half gates the other (Shazeer 2020)."""

    def __init__(self, width: int, hidden_size: int) -> None:
        super().__init__()
        self.linear_in = nn.Linear(width, 2 * hidden_size, bias=False, matrices=2)
        self.act = nn.SiLU()
        self.linear_out = nn.Linear(hidden_size, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = ops.chunk(self.linear_in(x), 2, 2)  # 2 x (B, N, M)
        return self.linear_out(self.act(gate) * value)  # (B, N, D)


class Flux2Block(nn.Module):
    """Attention of image and text to both, then an MLP for each."""

    def __init__(self, config: Flux2Config) -> None:
        super().__init__()
        D = config.hidden_size
        self.norm1, self.norm1_context = plain_norm(D), plain_norm(D)
        self.attn = JointAttention(D, config.num_attention_heads, bias=False)
        self.norm2, self.norm2_context = plain_norm(D), plain_norm(D)
        self.ff, self.ff_context = GatedMlp(D, config.mlp_width), GatedMlp(D, config.mlp_width)

    def forward(
        self,
        text: Tensor,
        x: Tensor,
        text_modulation: Tensor,
        image_modulation: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return text (B, L, D) and image (B, N, D); text_modulation, image_modulation: (B, 6 D) each."""
        image_parts = ops.chunk(image_modulation, 6, 1)  # 6 x (B, D): shift, scale, gate, ...
        text_parts = ops.chunk(text_modulation, 6, 1)  # 6 x (B, D)
        normed = modulate(self.norm1(x), image_parts[0], image_parts[1])  # (B, N, D)
        text_normed = modulate(self.norm1_context(text), text_parts[0], text_parts[1])  # (B, L, D)
        attended, text_attended = self.attn(normed, text_normed, cos, sin, mask)  # (B, N, D), (B, L, D)
        x = add_residual(x, attended, image_parts, self.norm2, self.ff)  # (B, N, D)
        return add_residual(text, text_attended, text_parts, self.norm2_context, self.ff_context), x


class ParallelAttention(nn.Module):
    """Self-attention and a gated MLP in parallel, with a fused first layer and a fused last layer."""

    def __init__(self, config: Flux2Config) -> None:
        super().__init__()
        D, M = config.hidden_size, config.mlp_width
        self.num_heads, self.sizes = config.num_attention_heads, (D, M)
        self.to_qkv_mlp_proj = nn.Linear(D, 3 * D + 2 * M, bias=False)
        self.norm_q, self.norm_k = nn.RMSNorm(config.head_dim, eps=EPS), nn.RMSNorm(config.head_dim, eps=EPS)
        self.act = nn.SiLU()
        self.to_out = nn.Linear(D + M, D, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        D, M = self.sizes
        x = self.to_qkv_mlp_proj(x)  # (B, N, 3 D + 2 M)
        q, k, v = (split_heads(part, self.num_heads) for part in ops.chunk(x[:, :, : 3 * D], 3, 2))  # (B, heads, N, d)
        attended = merge_heads(self_attention(self.norm_q(q), self.norm_k(k), v, cos, sin, mask))  # (B, N, D)
        value = self.act(x[:, :, 3 * D : 3 * D + M]) * x[:, :, 3 * D + M :]  # (B, N, M)
        return self.to_out(ops.cat([attended, value], 2))  # (B, N, D)


class Flux2SingleBlock(nn.Module):
    """Attention and MLP side by side, of text and image as one sequence."""

    def __init__(self, config: Flux2Config) -> None:
        super().__init__()
        self.norm = plain_norm(config.hidden_size)
        self.attn = ParallelAttention(config)

    def forward(self, x: Tensor, modulation: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return text and image (B, L + N, D); modulation: (B, 3 D)."""
        shift, scale, gate = ops.chunk(modulation, 3, 1)  # 3 x (B, D)
        return add_gated(x, gate, self.attn(modulate(self.norm(x), shift, scale), cos, sin, mask))


class Flux2(nn.Module):
    """The predictor: maps noised latents, time and text to the velocity towards noise."""

    def __init__(self, config: Flux2Config) -> None:
        super().__init__()
        self.config = config
        D, C = config.hidden_size, config.in_channels
        self.time_guidance_embed = TimeTextEmbedding(
            D, guidance=config.guidance_embeds, codes=config.timestep_guidance_channels, bias=False
        )
        self.double_stream_modulation_img, self.double_stream_modulation_txt = Modulation(D, 6), Modulation(D, 6)
        self.single_stream_modulation = Modulation(D, 3)
        self.x_embedder = nn.Linear(C, D, bias=False)
        self.context_embedder = nn.Linear(config.joint_attention_dim, D, bias=False)
        self.transformer_blocks = nn.Blocks([Flux2Block(config) for _ in range(config.num_layers)])
        self.single_transformer_blocks = nn.Blocks([Flux2SingleBlock(config) for _ in range(config.num_single_layers)])
        self.norm_out = AdaLayerNormContinuous(D, bias=False)
        self.proj_out = nn.Linear(D, C, bias=False, init=ZEROS, matrices=0)
        nn.set_constant(self, "guidance", (1,), lambda: np.array([config.guidance], np.float32))

    def forward(self, x: Tensor, t: Tensor, text: Tensor, guidance: Tensor | None = None) -> Tensor:
        """Predict.

        x: (B, C, h, w) noised latents; t: (B,) times from 0 (data) to 1 (noise); text: (B, L, joint_attention_dim),
        with attention to all states; guidance: (B,), instead of ``config.guidance``. Returns (B, C, h, w) in the dtype
        of the weights.
        """
        (_, C, h, w), L, text = x.shape, text.shape[1], pad_to_multiple(text)
        i, j, k, m = self.config.axes_dims_rope
        tables = rotary_positions(i, j, k, m, self.config.rope_theta, text.shape[1], h, w)  # (2, L + N, d / 2)
        mask = padding_mask(L, text.shape[1], h * w)  # (1, 1, 1, L + N)
        x = self.tokens(to_tokens(x), t, text, tables[0], tables[1], guidance, mask)  # (B, N, C)
        return ops.reshape(ops.permute(x, (0, 2, 1)), (-1, C, h, w))  # (B, C, h, w)

    def tokens(
        self,
        x: Tensor,
        t: Tensor,
        text: Tensor,
        cos: Tensor,
        sin: Tensor,
        guidance: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Do the same for tokens (B, N, C) at any positions; mask: (1, 1, 1, L + N), false for tokens to leave out."""
        L = text.shape[1]
        c = self.time_guidance_embed(t, None, self.guidance if guidance is None else guidance)  # (B, D)
        image_modulation = self.double_stream_modulation_img(c)  # (B, 6 D)
        text_modulation = self.double_stream_modulation_txt(c)  # (B, 6 D)
        single_modulation = self.single_stream_modulation(c)  # (B, 3 D)
        x = ops.split_tokens(self.x_embedder(ops.cast_like(x, self.x_embedder.weight)))  # (B, N, D)
        text = ops.split_tokens(self.context_embedder(ops.cast_like(text, self.context_embedder.weight)))  # (B, L, D)
        for block in self.transformer_blocks:
            text, x = block(text, x, text_modulation, image_modulation, cos, sin, mask)  # (B, L, D), (B, N, D)
        x = concat_tokens(text, x)  # (B, L + N, D)
        for block in self.single_transformer_blocks:
            x = block(x, single_modulation, cos, sin, mask)  # (B, L + N, D)
        return ops.gather_tokens(self.proj_out(self.norm_out(image_tokens(x, L), c)))  # (B, N, C)
