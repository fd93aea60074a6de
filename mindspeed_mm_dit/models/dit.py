"""DiT: a transformer over patches of noised latents, steered by timestep and class (Peebles & Xie 2023).

The parameters carry the names of the published checkpoints. Letters: B batch, C channels, H W height and
width, P patch, N tokens, D width.
"""

from __future__ import annotations

from typing import Any

from mindspeed_mm_dit.configs.dit import FREQUENCY_WIDTH, DiTConfig
from mindspeed_mm_dit.framework import nn, ops
from mindspeed_mm_dit.models.positions import sincos_positions_2d, timestep_frequencies

Tensor = Any  # a tensor of the active framework


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Scale and shift normalised tokens (B, N, D) by per-sample vectors (B, D)."""
    return ops.addcmul(shift[:, None], x, 1 + scale[:, None])


class PatchEmbed(nn.Module):
    """Cut latents into patches and embed each as a token."""

    def __init__(self, in_channels: int, patch_size: int, hidden_size: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_channels, hidden_size, kernel_size=patch_size, stride=patch_size)

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(ops.cast_like(x, self.proj.weight))  # (B, D, H/P, W/P)
        x = ops.reshape(x, (x.shape[0], x.shape[1], -1))  # (B, D, N)
        # PyTorch's CPU attention has wrong gradients where the last axis is not contiguous (pytorch/pytorch#187506).
        return ops.contiguous(ops.permute(x, (0, 2, 1)))  # (B, N, D)


class TimestepEmbedder(nn.Module):
    """Embed timesteps: sinusoids, then a two-layer MLP."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(FREQUENCY_WIDTH, hidden_size), nn.SiLU(), nn.Linear(hidden_size, hidden_size)
        )
        nn.set_constant(self, "frequencies", timestep_frequencies(FREQUENCY_WIDTH))

    def forward(self, t: Tensor) -> Tensor:
        return self.mlp(ops.cast_like(self.code(t), self.mlp[0].weight))  # (B, D)

    def code(self, t: Tensor) -> Tensor:
        """Return the sinusoids of timesteps (B,), whatever their scale."""
        angles = ops.to_float32(t)[:, None] * self.frequencies[None]  # (B, 128)
        return ops.cat([ops.cos(angles), ops.sin(angles)], 1)  # (B, 256)


class LabelEmbedder(nn.Module):
    """Embed class labels; the last row is the null class. Labels are dropped in the data, not here."""

    def __init__(self, num_embeddings: int, hidden_size: int) -> None:
        super().__init__()
        self.embedding_table = nn.Embedding(num_embeddings, hidden_size)

    def forward(self, labels: Tensor) -> Tensor:
        return self.embedding_table(labels)  # (B, D)


class Attention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.proj = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        B, N, D = x.shape
        q, k, v = (self._heads(part) for part in ops.chunk(self.qkv(x), 3, 2))  # 3 x (B, heads, N, d)
        x = ops.permute(ops.attention(q, k, v), (0, 2, 1, 3))  # (B, N, heads, d)
        return self.proj(ops.reshape(x, (B, N, D)))  # (B, N, D)

    def _heads(self, x: Tensor) -> Tensor:
        B, N, D = x.shape
        x = ops.reshape(x, (B, N, self.num_heads, D // self.num_heads))  # (B, N, heads, d)
        return ops.permute(x, (0, 2, 1, 3))  # (B, heads, N, d)


class Mlp(nn.Module):
    """Two linear layers around a GELU."""

    def __init__(self, hidden_size: int, mlp_hidden_size: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(hidden_size, mlp_hidden_size)
        self.act = nn.GELU(approximate="tanh")
        self.fc2 = nn.Linear(mlp_hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))  # (B, N, D)


class DiTBlock(nn.Module):
    """Transformer block with adaLN-Zero: the condition sets shift, scale and gate of both branches."""

    def __init__(self, hidden_size: int, num_heads: int, mlp_hidden_size: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden_size, eps=1e-6, elementwise_affine=False)
        self.attn = Attention(hidden_size, num_heads)
        self.norm2 = nn.LayerNorm(hidden_size, eps=1e-6, elementwise_affine=False)
        self.mlp = Mlp(hidden_size, mlp_hidden_size)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 6 * hidden_size))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        modulation = ops.chunk(self.adaLN_modulation(c), 6, 1)  # 6 x (B, D)
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = modulation
        attended = self.attn(modulate(self.norm1(x), shift_msa, scale_msa))  # (B, N, D)
        x = ops.addcmul(x, gate_msa[:, None], attended)  # (B, N, D)
        return ops.addcmul(x, gate_mlp[:, None], self.mlp(modulate(self.norm2(x), shift_mlp, scale_mlp)))  # (B, N, D)


class FinalLayer(nn.Module):
    """Modulated norm and a linear layer from tokens to patches."""

    def __init__(self, hidden_size: int, patch_size: int, out_channels: int) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(hidden_size, eps=1e-6, elementwise_affine=False)
        self.linear = nn.Linear(hidden_size, patch_size * patch_size * out_channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 2 * hidden_size))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale = ops.chunk(self.adaLN_modulation(c), 2, 1)  # 2 x (B, D)
        return self.linear(modulate(self.norm_final(x), shift, scale))  # (B, N, P * P * out_channels)


class DiT(nn.Module):
    """The predictor: noised latents, timestep and label to prediction (and variance, if learned)."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.config = config
        D, P = config.hidden_size, config.patch_size
        self.pos_embed = nn.frozen_parameter(sincos_positions_2d(D, config.input_size // P)[None])
        self.x_embedder = PatchEmbed(config.in_channels, P, D)
        self.t_embedder = TimestepEmbedder(D)
        self.y_embedder = LabelEmbedder(config.num_embeddings, D)
        self.blocks = nn.ModuleList(
            [DiTBlock(D, config.num_heads, config.mlp_hidden_size) for _ in range(config.num_layers)]
        )
        self.final_layer = FinalLayer(D, P, config.out_channels)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        """Predict.

        x: (B, C, H, W) noised latents; t: (B,) training timestep, 0 ... T-1; y: (B,) int label, the null
        class being ``config.null_label``. Returns (B, out_channels, H, W) in the dtype of the weights.
        """
        x = self.x_embedder(x)  # (B, N, D)
        x = x + ops.cast_like(self.pos_embed, x)  # (B, N, D)
        c = self.t_embedder(t) + self.y_embedder(y)  # (B, D)
        for block in self.blocks:
            x = block(x, c)  # (B, N, D)
        return self.unpatchify(self.final_layer(x, c))  # (B, out_channels, H, W)

    def unpatchify(self, x: Tensor) -> Tensor:
        """Lay patches (B, N, P * P * C) out as an image (B, C, H, W)."""
        P, C = self.config.patch_size, self.config.out_channels
        side = self.config.input_size // P
        x = ops.reshape(x, (x.shape[0], side, side, P, P, C))  # (B, h, w, P, P, C)
        x = ops.permute(x, (0, 5, 1, 3, 2, 4))  # (B, C, h, P, w, P)
        return ops.reshape(x, (x.shape[0], C, side * P, side * P))  # (B, C, H, W)
