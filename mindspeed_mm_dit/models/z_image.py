"""Z-Image (Z-Image Team 2025), which loads the weights of diffusers' ZImageTransformer2DModel by name.

Blocks of the image alone and of the text alone, then blocks of both as one sequence. Each of both is padded to a
multiple of 32 tokens with a learned token. Letters: B batch, C channels, H W height and width of latents, h w the same
in patches of 2 x 2, N tokens of the image, L of the text, both padded, D width of a token, d of a head, c the condition
(B, T).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.joint import UNIT, ZImageConfig
from mindspeed_mm_dit.configs.predictor import ZEROS, Normal
from mindspeed_mm_dit.framework import nn, ops
from mindspeed_mm_dit.models.joint import (
    TIMESTEP_SCALE,
    Attention,
    concat_tokens,
    nonzero_mask,
    plain_norm,
    prefix_mask,
)
from mindspeed_mm_dit.models.layers import TimestepEmbedder, unpatchify
from mindspeed_mm_dit.models.positions import grid_positions, rotary_at_positions

Tensor = Any  # a tensor of the active framework
NORM_EPS, TIME_HIDDEN = 1e-5, 1024
"""Of all RMSNorms; width between the layers that embed a time."""


def padded_length(count: int) -> int:
    """Return ``count`` tokens, rounded up to whole units."""
    return -(-count // UNIT) * UNIT


@ops.from_host(lambda i, j, k, theta, L, h, w: (2, padded_length(h * w) + L, (i + j + k) // 2))
def rotary_positions(i: int, j: int, k: int, theta: float, L: int, h: int, w: int) -> np.ndarray:
    """Return rotary cosines, then sines, of an image and a text, (2, N + L, d / 2), without the image's first axis.

    The text is at (1, 0, 0), (2, 0, 0), ... i, j, k: channels of the axes.
    """
    padding, text = np.zeros((padded_length(h * w) - h * w, 3)), np.zeros((L, 3))
    text[:, 0] = 1 + np.arange(L)
    return rotary_at_positions(np.concatenate([grid_positions(h, w), padding, text]), (i, j, k), theta)


@ops.from_host(lambda i, theta, units: (units, 2, 1, i // 2))
def first_axis_after_text(i: int, theta: float, units: int) -> np.ndarray:
    """Return cosines and sines of an image's first axis after texts of 1, 2, ... units, (units, 2, 1, i / 2)."""
    ends = 1 + UNIT * np.arange(1, units + 1)[:, None]
    return rotary_at_positions(ends, (i,), theta).transpose(1, 0, 2)[:, :, None]


class FeedForward(nn.Module):
    """An MLP in which one layer gates another (Shazeer 2020)."""

    def __init__(self, width: int, hidden_size: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, hidden_size, bias=False)
        self.w2 = nn.Linear(hidden_size, width, bias=False)
        self.w3 = nn.Linear(width, hidden_size, bias=False)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.act(self.w1(x)) * self.w3(x))  # (B, N, D)


class ZImageBlock(nn.Module):
    """Attention and an MLP, each between two norms; a condition, if there is one, scales their inputs and outputs."""

    def __init__(self, config: ZImageConfig, conditioned: bool = True) -> None:
        super().__init__()
        D, self.conditioned = config.hidden_size, conditioned
        self.attention = Attention(D, config.num_attention_heads, bias=False, eps=NORM_EPS)
        self.feed_forward = FeedForward(D, config.mlp_width)
        self.attention_norm1, self.attention_norm2 = nn.RMSNorm(D, eps=NORM_EPS), nn.RMSNorm(D, eps=NORM_EPS)
        self.ffn_norm1, self.ffn_norm2 = nn.RMSNorm(D, eps=NORM_EPS), nn.RMSNorm(D, eps=NORM_EPS)
        if conditioned:
            layer = nn.Linear(config.time_width, 4 * D, init=ZEROS, matrices=4)
            self.adaLN_modulation = nn.Sequential(layer)

    def forward(self, x: Tensor, c: Tensor | None, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return tokens (B, N, D); cos, sin: (N, d / 2) or (B, 1, N, d / 2); mask: (B, 1, 1, N), if used."""
        if not self.conditioned:
            x = x + self.attention_norm2(self.attention(self.attention_norm1(x), cos, sin, mask))  # (B, N, D)
            return x + self.ffn_norm2(self.feed_forward(self.ffn_norm1(x)))  # (B, N, D)
        scale, gate, mlp_scale, mlp_gate = ops.chunk(self.adaLN_modulation(c)[:, None], 4, 2)  # 4 x (B, 1, D)
        attended = self.attention(self.attention_norm1(x) * (1 + scale), cos, sin, mask)  # (B, N, D)
        x = ops.addcmul(x, ops.tanh(gate), self.attention_norm2(attended))  # (B, N, D)
        mixed = self.feed_forward(self.ffn_norm1(x) * (1 + mlp_scale))  # (B, N, D)
        return ops.addcmul(x, ops.tanh(mlp_gate), self.ffn_norm2(mixed))  # (B, N, D)


class FinalLayer(nn.Module):
    """A scaled norm and a linear layer from tokens to patches."""

    def __init__(self, config: ZImageConfig) -> None:
        super().__init__()
        D = config.hidden_size
        self.norm_final = plain_norm(D)
        self.linear = nn.Linear(D, 4 * config.in_channels, init=ZEROS, matrices=0)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(config.time_width, D, init=ZEROS))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        return self.linear(self.norm_final(x) * (1 + self.adaLN_modulation(c)[:, None]))  # (B, N, 4 C)


class NamedPatchLayer(nn.Module):
    """A layer under the name that diffusers has for patches of 2 x 2 and one frame."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        setattr(self, "2-1", layer)

    def forward(self, *inputs: Tensor) -> Tensor:
        return getattr(self, "2-1")(*inputs)


class ZImage(nn.Module):
    """The predictor: maps noised latents, time and text to the velocity towards data."""

    def __init__(self, config: ZImageConfig) -> None:
        super().__init__()
        self.config = config
        D, refiners = config.hidden_size, range(config.num_refiner_layers)
        self.x_pad_token = nn.parameter((1, D), Normal(0.02))
        self.cap_pad_token = nn.parameter((1, D), Normal(0.02))
        self.all_x_embedder = NamedPatchLayer(nn.Linear(4 * config.in_channels, D))
        self.all_final_layer = NamedPatchLayer(FinalLayer(config))
        self.noise_refiner = nn.Blocks([ZImageBlock(config) for _ in refiners])
        self.context_refiner = nn.Blocks([ZImageBlock(config, conditioned=False) for _ in refiners])
        self.t_embedder = TimestepEmbedder(config.time_width, TIME_HIDDEN)
        norm = nn.RMSNorm(config.joint_attention_dim, eps=NORM_EPS)
        self.cap_embedder = nn.Sequential(norm, nn.Linear(config.joint_attention_dim, D))
        self.layers = nn.Blocks([ZImageBlock(config) for _ in range(config.num_layers)])

    def forward(self, x: Tensor, t: Tensor, text: Tensor) -> Tensor:
        """Predict.

        x: (B, C, H, W) noised latents of even sides; t: (B,) times from 0 (noise) to 1 (data); text: (B, any length,
        joint_attention_dim), in which trailing states of zeros are padding. Returns (B, C, H, W) in the dtype of the
        weights.
        """
        h, w = x.shape[2] // 2, x.shape[3] // 2
        padding = padded_length(text.shape[1]) - text.shape[1]
        text = ops.pad(text, (0, 0, 0, padding))  # (B, L, joint_attention_dim)
        text = ops.cast_like(text, self.cap_embedder[1].weight)  # (B, L, joint_attention_dim)
        is_word = nonzero_mask(text)  # (B, L)
        used = self.used_units(is_word)  # (B, L / 32)
        (cos, sin), N = self.positions(used, h, w), padded_length(h * w)  # 2 x (B, 1, N + L, d / 2)
        c = self.t_embedder(TIMESTEP_SCALE * t)  # (B, T)
        patches = ops.cast_like(self.patches(x, N), self.x_pad_token)  # (B, N, 4 C)
        x = ops.where(prefix_mask(h * w, N)[:, :, None], self.all_x_embedder(patches), self.x_pad_token)
        x = ops.split_tokens(x)  # (B, N, D)
        for block in self.noise_refiner:
            x = block(x, c, cos[:, :, :N], sin[:, :, :N])  # (B, N, D)
        B, units = used.shape
        mask = ops.reshape(ops.broadcast_to(used[:, :, None], (B, units, UNIT)), (B, 1, 1, UNIT * units))
        text = ops.where(is_word[:, :, None], self.cap_embedder(text), self.cap_pad_token)  # (B, L, D)
        text = ops.split_tokens(text)  # (B, L, D)
        for block in self.context_refiner:
            text = block(text, None, cos[:, :, N:], sin[:, :, N:], mask)  # (B, L, D)
        x = concat_tokens(x, text)  # (B, N + L, D)
        image_mask = ops.broadcast_to(ops.reshape(prefix_mask(N, N), (1, 1, 1, N)), (B, 1, 1, N))  # true
        mask = ops.cat([image_mask, mask], 3)  # (B, 1, 1, N + L)
        for block in self.layers:
            x = block(x, c, cos, sin, mask)  # (B, N + L, D)
        return unpatchify(ops.gather_tokens(self.all_final_layer(x, c))[:, : h * w], (h, w), 2)  # (B, C, H, W)

    @staticmethod
    def patches(x: Tensor, N: int) -> Tensor:
        """Cut latents (B, C, H, W) into patches of 2 x 2, the channel fastest, and add zeros up to (B, N, 4 C)."""
        B, C, H, W = x.shape
        x = ops.reshape(x, (B, C, H // 2, 2, W // 2, 2))  # (B, C, h, 2, w, 2)
        x = ops.reshape(ops.permute(x, (0, 2, 4, 3, 5, 1)), (B, -1, 4 * C))  # (B, h w, 4 C)
        return ops.pad(x, (0, 0, 0, N - x.shape[1]))

    @staticmethod
    def used_units(is_word: Tensor) -> Tensor:
        """Return a mask of a text's units that have words, and of the first unit, (B, L / 32) bool."""
        unit_starts = is_word[:, ::UNIT]  # (B, L / 32)
        first = ops.broadcast_to(prefix_mask(1, unit_starts.shape[1]), unit_starts.shape)  # (B, L / 32)
        return ops.where(first, first, unit_starts)

    def positions(self, used: Tensor, h: int, w: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, (B, 1, N + L, d / 2), of an image after a text with ``used`` units, and of it."""
        (B, units), (i, j, k), theta = used.shape, self.config.axes_dims_rope, self.config.rope_theta
        tables = rotary_positions(i, j, k, theta, UNIT * units, h, w)  # (2, N + L, d / 2)
        tables = ops.broadcast_to(tables[None], (B, *tables.shape))  # (B, 2, N + L, d / 2)
        ends = first_axis_after_text(i, theta, units)  # (units, 2, 1, i / 2)
        end = ops.broadcast_to(ends[0][None], (B, 2, 1, i // 2))
        for number in range(1, units):
            end = ops.where(used[:, number][:, None, None, None], ends[number][None], end)  # (B, 2, 1, i / 2)
        image = ops.cat([ops.broadcast_to(end, (B, 2, h * w, i // 2)), tables[:, :, : h * w, i // 2 :]], 3)
        tables = ops.cat([image, tables[:, :, h * w :]], 2)  # (B, 2, N + L, d / 2)
        return tables[:, :1], tables[:, 1:]
