"""DiT: a transformer over patches of noised latents, conditioned on timestep and class (Peebles & Xie 2023), or text.

The parameters have the names of the published checkpoints. Letters: B batch, C channels, H W height and
width, P patch, N tokens, L tokens of text, D width.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.dit import DiTConfig
from mindspeed_mm_dit.configs.predictor import ZEROS, Normal
from mindspeed_mm_dit.framework import nn, ops
from mindspeed_mm_dit.models.layers import (
    FullWidthNormAttention,
    SwiGLU,
    TimestepEmbedder,
    TwoLayerMlp,
    merge_heads,
    modulate,
    self_attention,
    split_heads,
    to_tokens,
    unpatchify,
)
from mindspeed_mm_dit.models.positions import rotary_tables_2d, sincos_positions_2d

Tensor = Any  # a tensor of the active framework
Grid = tuple[int, int]
"""Rows and columns of patches."""


@ops.from_host(lambda width, base, rows, columns: (rows * columns, width))
def added_positions(width: int, base: int, rows: int, columns: int) -> Any:
    """Return position embeddings of a rectangle, (N, width), for a network made for squares of side ``base``."""
    return sincos_positions_2d(width, base, (rows, columns))


@ops.from_host(lambda head_dim, base, num_prefix, rows, columns: (2, num_prefix + rows * columns, head_dim // 2))
def rotary_positions(head_dim: int, base: int, num_prefix: int, rows: int, columns: int) -> Any:
    """Return rotary cosines, then sines, for the tokens of a rectangle, (2, num_prefix + N, head_dim / 2)."""
    return np.stack(rotary_tables_2d(head_dim, base, num_prefix, (rows, columns)))


def sincos_square(draw: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Return the frozen position embedding of a square, (1, N, D)."""
    return sincos_positions_2d(shape[2], math.isqrt(shape[1]))[None]


class PatchEmbed(nn.Module):
    """Cut latents into patches and embed each as a token."""

    def __init__(self, in_channels: int, patch_size: int, hidden_size: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_channels, hidden_size, kernel_size=patch_size, stride=patch_size)

    def forward(self, x: Tensor) -> Tensor:
        return to_tokens(self.proj(ops.cast_like(x, self.proj.weight)))  # (B, N, D)


class BottleneckPatchEmbed(nn.Module):
    """Cut images into patches and embed each through a narrow layer, since pixels of large patches lie near a
    low-dimensional subspace (JiT).
    """

    def __init__(self, config: DiTConfig, bottleneck_dim: int) -> None:
        super().__init__()
        P, D = config.patch_size, config.hidden_size
        self.proj1 = nn.Conv2d(config.in_channels, bottleneck_dim, kernel_size=P, stride=P, bias=False)
        self.proj2 = nn.Conv2d(bottleneck_dim, D, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj1(ops.cast_like(x, self.proj1.weight))  # (B, bottleneck_dim, H/P, W/P)
        return to_tokens(self.proj2(x))  # (B, N, D)


class LabelEmbedder(nn.Module):
    """Embed class labels; the last row is the unconditional class. Label dropout happens in the data, not here."""

    def __init__(self, num_embeddings: int, hidden_size: int) -> None:
        super().__init__()
        self.embedding_table = nn.Embedding(num_embeddings, hidden_size, init=Normal(0.02))

    def forward(self, labels: Tensor) -> Tensor:
        return self.embedding_table(labels)  # (B, D)


class Attention(nn.Module):
    """Multi-head self-attention with optional norms of queries and keys per head, and optional rotary positions."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        D = config.hidden_size
        self.num_heads, self.qk_norm = config.num_heads, config.qk_norm
        self.qkv = nn.Linear(D, 3 * D, matrices=3)
        self.proj = nn.Linear(D, D)
        if config.qk_norm:
            self.q_norm, self.k_norm = head_norm(config), head_norm(config)

    def forward(self, x: Tensor, cos: Tensor | None = None, sin: Tensor | None = None) -> Tensor:
        """Return tokens (B, N, D); cos, sin: rotary positions (N, d / 2), if used."""
        q, k, v = (split_heads(part, self.num_heads) for part in ops.chunk(self.qkv(x), 3, 2))  # 3 x (B, heads, N, d)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return self.proj(merge_heads(self_attention(q, k, v, cos, sin)))  # (B, N, D)


class Mlp(nn.Module):
    """Two linear layers around a GELU."""

    def __init__(self, hidden_size: int, mlp_hidden_size: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(hidden_size, mlp_hidden_size)
        self.act = nn.GELU(approximate="tanh")
        self.fc2 = nn.Linear(mlp_hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))  # (B, N, D)


def token_norm(config: DiTConfig) -> Any:
    """Return a norm over the width of a token."""
    if config.rms_norm:
        return nn.RMSNorm(config.hidden_size, eps=1e-6)
    return nn.LayerNorm(config.hidden_size, eps=1e-6, elementwise_affine=False)


def head_norm(config: DiTConfig) -> Any:
    """Return a norm over the width of a head; here LayerNorm's eps differs from all others, as published."""
    if config.rms_norm:
        return nn.RMSNorm(config.head_dim, eps=1e-6)
    return nn.LayerNorm(config.head_dim, eps=1e-5, elementwise_affine=True)


class DiTBlock(nn.Module):
    """Transformer block with adaLN-Zero: the condition sets shift, scale and gate of both branches."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        D, M, mlp = config.hidden_size, config.num_modulations, SwiGLU if config.swiglu else Mlp
        self.num_modulations = M
        self.norm1 = token_norm(config)
        self.attn = Attention(config)
        if config.text_dim:
            # Zero at init, so that adding captions to a trained class-conditional DiT does not change its output.
            self.cross_attn = FullWidthNormAttention(D, config.num_heads, eps=1e-6, init_out=ZEROS)
        self.norm2 = token_norm(config)
        self.mlp = mlp(D, config.mlp_hidden_size)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(D, M * D, init=ZEROS, matrices=M))

    def forward(
        self, x: Tensor, c: Tensor, cos: Tensor | None = None, sin: Tensor | None = None, text: Tensor | None = None
    ) -> Tensor:
        """Return tokens (B, N, D).

        c: (B, D); cos, sin: rotary positions (N, d / 2), if used; text: embedded text (B, L, D) for cross-attention
        between self-attention and MLP (PixArt-alpha), if used.
        """
        modulation = ops.chunk(self.adaLN_modulation(c), self.num_modulations, 1)  # 6 or 4 x (B, D)
        if self.num_modulations == 4:
            (scale_msa, gate_msa, scale_mlp, gate_mlp), shift_msa, shift_mlp = modulation, None, None
        else:
            shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = modulation
        attended = self.attn(modulate(self.norm1(x), shift_msa, scale_msa), cos, sin)  # (B, N, D)
        x = ops.addcmul(x, gate_msa[:, None], attended)  # (B, N, D)
        if text is not None:
            x = x + self.cross_attn(x, text)  # (B, N, D)
        return ops.addcmul(x, gate_mlp[:, None], self.mlp(modulate(self.norm2(x), shift_mlp, scale_mlp)))  # (B, N, D)


class FinalLayer(nn.Module):
    """A modulated norm and a linear layer from tokens to patches."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        D, patch = config.hidden_size, config.patch_size**2
        self.norm_final = token_norm(config)
        self.linear = nn.Linear(D, patch * config.out_channels, init=ZEROS, matrices=0)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(D, 2 * D, init=ZEROS, matrices=2))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale = ops.chunk(self.adaLN_modulation(c), 2, 1)  # 2 x (B, D)
        return self.linear(modulate(self.norm_final(x), shift, scale))  # (B, N, P * P * out_channels)


def make_projector(config: DiTConfig, width: int) -> Any:
    """Return an MLP from tokens (..., D) to the features of a teacher, (..., width) (REPA; Yu et al. 2024)."""
    D, P = config.hidden_size, config.projector_dim
    return nn.Sequential(nn.Linear(D, P), nn.SiLU(), nn.Linear(P, P), nn.SiLU(), nn.Linear(P, width))


class DiT(nn.Module):
    """The predictor: maps noised latents, timestep, label and text to a prediction (and variance, if learned)."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.config = config
        D, P = config.hidden_size, config.patch_size
        self.base = config.input_size // P
        self.pos_embed = nn.parameter((1, self.base**2, D), sincos_square, trained=False)
        narrow = config.bottleneck_dim
        self.x_embedder = BottleneckPatchEmbed(config, narrow) if narrow else PatchEmbed(config.in_channels, P, D)
        self.t_embedder = TimestepEmbedder(D)
        if config.h_embedder:
            self.h_embedder = TimestepEmbedder(D)
        self._condition_index = {name: index for index, name in enumerate(config.conditions.names)}
        if config.num_classes:
            self.y_embedder = LabelEmbedder(config.num_embeddings, D)
        if config.text_dim:
            self.text_embedder = TwoLayerMlp(config.text_dim, D, nn.GELU(approximate="tanh"))
        if config.pooled_dim:
            self.pooled_embedder = TwoLayerMlp(config.pooled_dim, D, nn.SiLU())
        if config.in_context_len:
            self.in_context_posemb = nn.parameter((1, config.in_context_len, D), Normal(0.02))
        if config.rope:
            sizes = (config.head_dim, self.base, config.in_context_len)
            shape = (config.in_context_len + self.base**2, config.head_dim // 2)
            nn.set_constant(self, "rope_cos", shape, lambda: rotary_tables_2d(*sizes)[0])
            nn.set_constant(self, "rope_sin", shape, lambda: rotary_tables_2d(*sizes)[1])
        self.blocks = nn.Blocks([DiTBlock(config) for _ in range(config.num_layers)])
        if config.z_dims:
            self.projectors = nn.ModuleList([make_projector(config, width) for width in config.z_dims])
        self.final_layer = FinalLayer(config)

    def forward(self, x: Tensor, t: Tensor, *conditions: Tensor, project: bool = False) -> Any:
        """Predict.

        x: (B, C, H, W) noised latents, of any height and width that the patch size divides; t: (B,) training timestep,
        0 ... T-1, or a real time of flow matching, or (B, 2) the ends of an interval, the later first; conditions: in
        the order of ``config.conditions``: labels (B,) int, the unconditional class being ``config.num_classes``; text
        (B, L, text_dim), with attention to all states; pooled (B, pooled_dim). Returns (B, out_channels, H, W) in the
        dtype of the weights. With ``project``, also returns each projector's output for the tokens after block
        ``encoder_depth``, a tuple of (B, N, z_dim).
        """
        grid = (x.shape[2] // self.config.patch_size, x.shape[3] // self.config.patch_size)
        x = self.x_embedder(x)  # (B, N, D)
        # (with context parallelism, each rank has its part of the N tokens from here on)
        x = ops.split_tokens(x + ops.cast_like(self._added(grid), x))  # (B, N, D)
        c: Tensor = self._times(t)  # (B, D)
        label: Tensor = None
        text: Tensor = None
        if self.config.num_classes:
            label = self.y_embedder(conditions[self._condition_index["labels"]])  # (B, D)
            c = c + label  # (B, D)
        if self.config.pooled_dim:
            c = c + self.pooled_embedder(conditions[self._condition_index["pooled"]])  # (B, D)
        if self.config.text_dim:
            text = self.text_embedder(conditions[self._condition_index["text"]])  # (B, L, D)
        joined, first, projected = 0, self.config.in_context_start, ()
        cos, sin = self._positions(joined, grid)
        for number, block in enumerate(self.blocks):
            if number == first and self.config.in_context_len:
                joined = self.config.in_context_len
                tokens = label[:, None] + self.in_context_posemb  # (B, in_context_len, D)
                x = ops.cat([ops.cast_like(tokens, x), ops.gather_tokens(x)], 1)  # (B, in_context_len + N, D)
                x = ops.split_tokens(x)  # (B, in_context_len + N, D)
                cos, sin = self._positions(joined, grid)
            x = block(x, c, cos, sin, text)  # (B, joined + N, D)
            if project and number + 1 == self.config.encoder_depth:
                tokens = ops.gather_tokens(x)[:, joined:]  # (B, N, D)
                projected = tuple([projector(tokens) for projector in self.projectors])  # (B, N, z_dim) each
        if joined:
            x = ops.split_tokens(ops.gather_tokens(x)[:, joined:])  # (B, N, D)
        x = ops.gather_tokens(self.final_layer(x, c))  # (B, N, P * P * out_channels)
        output = unpatchify(x, grid, self.config.patch_size)  # (B, out_channels, H, W)
        return (output, projected) if project else output

    def _times(self, t: Tensor) -> Tensor:
        """Return embedded times, (B, D)."""
        if self.config.h_embedder:
            return self.t_embedder(t[:, 0]) + self.h_embedder(t[:, 0] - t[:, 1])
        return self.t_embedder(t)

    def _added(self, grid: Grid) -> Tensor:
        """Return the position embeddings that are added to the tokens of a grid, (1, N, D)."""
        if grid == (self.base, self.base):
            return self.pos_embed
        return added_positions(self.config.hidden_size, self.base, grid[0], grid[1])[None]

    def _positions(self, joined: int, grid: Grid) -> tuple[Tensor | None, Tensor | None]:
        """Return rotary positions of ``joined`` in-context tokens, then the image's: (joined + N, d / 2), if used."""
        if not self.config.rope:
            return None, None
        unused = self.config.in_context_len - joined
        if grid == (self.base, self.base):
            return self.rope_cos[unused:], self.rope_sin[unused:]
        tables = rotary_positions(self.config.head_dim, self.base, joined, grid[0], grid[1])
        return tables[0], tables[1]
