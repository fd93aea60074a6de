"""Layers that image and video transformers share. Letters: B batch, N tokens, D width of a token, d of a head."""

from __future__ import annotations

from typing import Any

from mindspeed_mm_dit.framework import nn, ops

Tensor = Any  # a tensor of the active framework


def timestep_code(t: Tensor, frequencies: Tensor) -> Tensor:
    """Return the sinusoids of times (B,), whatever their scale: cosines, then sines, (B, 2 x frequencies) float32."""
    angles = ops.to_float32(t)[:, None] * frequencies[None]  # (B, frequencies)
    return ops.cat([ops.cos(angles), ops.sin(angles)], 1)


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, N, D) -> (B, heads, N, d)."""
    B, N, D = x.shape
    return ops.permute(ops.reshape(x, (B, N, num_heads, D // num_heads)), (0, 2, 1, 3))


def merge_heads(x: Tensor) -> Tensor:
    """(B, heads, N, d) -> (B, N, D)."""
    x = ops.permute(x, (0, 2, 1, 3))  # (B, N, heads, d)
    return ops.reshape(x, (x.shape[0], x.shape[1], -1))


class SwiGLU(nn.Module):
    """An MLP of which one half gates the other (Shazeer 2020)."""

    def __init__(self, width: int, hidden_size: int) -> None:
        super().__init__()
        self.w12 = nn.Linear(width, 2 * hidden_size)
        self.act = nn.SiLU()
        self.w3 = nn.Linear(hidden_size, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = ops.chunk(self.w12(x), 2, -1)  # 2 x (B, N, hidden)
        return self.w3(self.act(gate) * value)  # (B, N, D)
