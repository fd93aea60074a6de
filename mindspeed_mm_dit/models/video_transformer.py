"""Wan 2.1 and 2.2 (Wan Team 2025), which load the weights of diffusers' WanTransformer3DModel by name; and the
CustomDiT of MindSpeed-MM's tutorial "develop a new model": Wan's layers with the blocks wired differently.

A transformer over patches of noised video latents, conditioned on a timestep, on a text or a label, and on the first
and last frame of a video. Parameters have diffusers' names, and the initial values of Wan's code: linear layers by
Xavier, those that embed time and text by a normal of 0.02, the last layer zero, the modulation tables by a normal of
D^(-1/2).

Letters: B batch, C channels, F H W frames, height and width of latents, f h w the same in patches, N = f h w tokens, L
tokens of text, D width of a token, d of a head; n is 1 if all tokens of a sample have one time, N if each has its own.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.predictor import XAVIER_UNIFORM, ZEROS, Normal
from mindspeed_mm_dit.configs.video_transformer import CustomDiTConfig, VideoTransformerConfig, WanConfig
from mindspeed_mm_dit.framework import nn, ops
from mindspeed_mm_dit.models.layers import FeedForward, FullWidthNormAttention, TwoLayerMlp, timestep_embedding
from mindspeed_mm_dit.models.positions import rotary_pairs_by_axis, rotary_table, timestep_frequencies

Tensor = Any  # a tensor of the active framework
Grid = tuple[int, int, int]
"""(f, h, w)."""


class PatchEmbedding(nn.Module):
    """A convolution whose stride equals its kernel: cut into patches, then one matrix product."""

    def __init__(self, config: VideoTransformerConfig) -> None:
        super().__init__()
        self.patch_size = config.patch_size
        self.weight = nn.parameter((config.hidden_size, config.in_channels, *config.patch_size), XAVIER_UNIFORM)
        self.bias = nn.parameter((config.hidden_size,))

    def forward(self, x: Tensor) -> Tensor:
        (B, C, F, H, W), (p, q, r) = x.shape, self.patch_size
        x = ops.reshape(x, (B, C, F // p, p, H // q, q, W // r, r))  # (B, C, f, p, h, q, w, r)
        x = ops.permute(x, (0, 2, 4, 6, 1, 3, 5, 7))  # (B, f, h, w, C, p, q, r)
        x = ops.reshape(x, (B, -1, C * p * q * r))  # (B, N, C p q r)
        weight = ops.reshape(self.weight, (self.weight.shape[0], -1))  # (D, C p q r)
        return ops.linear(ops.cast_like(x, weight), weight, self.bias)  # (B, N, D)


class RotaryPositions(nn.Module):
    """Cosines and sines of rotary position embeddings along three axes (Su et al. 2021)."""

    def __init__(self, head_dim: int, length: int) -> None:
        super().__init__()
        for axis, pairs in zip("fhw", rotary_pairs_by_axis(head_dim)):
            nn.set_constant(self, f"cos_{axis}", (length, pairs), partial(rotary_table, np.cos, pairs, length))
            nn.set_constant(self, f"sin_{axis}", (length, pairs), partial(rotary_table, np.sin, pairs, length))

    def forward(self, f: int, h: int, w: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, each (N, d / 2) float32, tokens in the order of frames, rows, columns."""
        cos = self._spread(self.cos_f[:f], self.cos_h[:h], self.cos_w[:w])
        return cos, self._spread(self.sin_f[:f], self.sin_h[:h], self.sin_w[:w])

    def _spread(self, frames: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        (f, i), (h, j), (w, k) = frames.shape, rows.shape, columns.shape
        frames = ops.broadcast_to(ops.reshape(frames, (f, 1, 1, i)), (f, h, w, i))
        rows = ops.broadcast_to(ops.reshape(rows, (1, h, 1, j)), (f, h, w, j))
        columns = ops.broadcast_to(ops.reshape(columns, (1, 1, w, k)), (f, h, w, k))
        return ops.reshape(ops.cat([frames, rows, columns], 3), (f * h * w, i + j + k))


class ConditionEmbedder(nn.Module):
    """Embed timesteps and conditions: class labels, the states of a text encoder."""

    def __init__(self, config: VideoTransformerConfig) -> None:
        super().__init__()
        D = config.hidden_size
        self.time_embedder = TwoLayerMlp(config.freq_dim, D, nn.SiLU(), Normal(0.02))
        self.act_fn = nn.SiLU()
        self.time_proj = nn.Linear(D, 6 * D, matrices=6)
        self.has_labels, self.has_text = config.num_classes > 0, config.text_dim is not None
        if config.text_dim:
            self.text_embedder = TwoLayerMlp(config.text_dim, D, nn.GELU(approximate="tanh"), Normal(0.02))
        if config.num_classes:
            self.label_embedder = nn.Embedding(config.num_embeddings, D, init=Normal(0.02))
        nn.set_constant(self, "frequencies", (config.freq_dim // 2,), lambda: timestep_frequencies(config.freq_dim))

    def forward(self, t: Tensor, *conditions: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the embedded time (B, n, D), each block's modulation (B, n, 6 D), and the embedded text (B, L, D).

        t: (B, n); conditions: labels (B,), text (B, L, text_dim), or both. The label is added to the time, as in DiT.
        """
        code = timestep_embedding(ops.reshape(t, (-1,)), self.frequencies)  # (B n, freq_dim)
        time = ops.reshape(self.time_embedder(code), (*t.shape, -1))  # (B, n, D)
        if self.has_labels:
            time = time + self.label_embedder(conditions[0])[:, None]  # (B, n, D)
        text: Tensor = None
        if self.has_text:
            text = self.text_embedder(conditions[-1])  # (B, L, D)
        return time, self.time_proj(self.act_fn(time)), text


class ImageEmbedder(nn.Module):
    """Embed CLIP's features of an image, (B, L, image_dim), to the width of a token."""

    def __init__(self, image_dim: int, hidden_size: int, length: int | None) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(image_dim, eps=1e-5, elementwise_affine=True)
        self.ff = FeedForward(image_dim, image_dim, hidden_size, "none")
        self.norm2 = nn.LayerNorm(hidden_size, eps=1e-5, elementwise_affine=True)
        self.has_positions = length is not None
        if length is not None:
            self.pos_embed = nn.parameter((1, length, image_dim))

    def forward(self, x: Tensor) -> Tensor:
        if self.has_positions:
            x = x + self.pos_embed  # (B, L, image_dim)
        return self.norm2(self.ff(self.norm1(x)))  # (B, L, D)


class VideoBlock(nn.Module):
    """Self-attention, cross-attention to a text if there is one, MLP; the time modulates self-attention and MLP.

    ``added``: width of embedded features of an image, to which cross-attention attends too.
    """

    def __init__(self, config: VideoTransformerConfig, affine: bool, added: int | None = None) -> None:
        super().__init__()
        D, eps = config.hidden_size, config.eps
        self.norm1 = nn.LayerNorm(D, eps=eps, elementwise_affine=affine)
        self.attn1 = FullWidthNormAttention(D, config.num_heads, eps)
        if config.text_dim:
            self.attn2 = FullWidthNormAttention(D, config.num_heads, eps, added=added)
        self.norm3 = nn.LayerNorm(D, eps=eps, elementwise_affine=affine)
        self.ffn = FeedForward(D, config.ffn_dim, D)
        self.scale_shift_table = nn.parameter((1, 6, D), Normal(D**-0.5))

    def forward(
        self, x: Tensor, text: Tensor | None, time: Tensor, cos: Tensor, sin: Tensor, image: Tensor | None = None
    ) -> Tensor:
        """Return tokens (B, N, D); text, image: (B, L, D) each, or None; time: (B, n, 6 D); cos, sin: (N, d / 2)."""
        modulation = ops.chunk(ops.reshape(self.scale_shift_table, (1, 1, -1)) + time, 6, 2)  # 6 x (B, n, D)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = modulation
        # Modulation may have higher precision than the tokens, which stay in theirs, as in diffusers.
        normed = ops.cast_like(ops.addcmul(shift, self.norm1(x), 1 + scale), x)  # (B, N, D)
        x = ops.cast_like(ops.addcmul(x, gate, self.attn1(normed, normed, cos, sin)), x)  # (B, N, D)
        if text is not None:
            x = x + self.attn2(self.cross_attention_input(x, normed), text, second=image)  # (B, N, D)
        normed = ops.cast_like(ops.addcmul(mlp_shift, self.norm3(x), 1 + mlp_scale), x)  # (B, N, D)
        return ops.cast_like(ops.addcmul(x, mlp_gate, self.ffn(normed)), x)  # (B, N, D)

    def cross_attention_input(self, x: Tensor, normed: Tensor) -> Tensor:
        """Return the input (B, N, D) of cross-attention from tokens ``x`` and ``normed``, that of self-attention."""
        raise NotImplementedError


class VideoTransformer(nn.Module):
    """The predictor: maps noised video latents, timestep and text to a prediction. ``block`` builds one block."""

    def __init__(self, config: Any, block: Any) -> None:
        super().__init__()
        self.config = config
        D = config.hidden_size
        self.rope = RotaryPositions(config.head_dim, config.rope_max_seq_len)
        self.patch_embedding = PatchEmbedding(config)
        self.condition_embedder = ConditionEmbedder(config)
        self.blocks = nn.Blocks([block(config) for _ in range(config.num_layers)])
        self.norm_out = nn.LayerNorm(D, eps=config.eps, elementwise_affine=False)
        self.proj_out = nn.Linear(D, config.out_channels * math.prod(config.patch_size), init=ZEROS, matrices=0)
        self.scale_shift_table = nn.parameter((1, 2, D), Normal(D**-0.5))

    def forward(self, x: Tensor, t: Tensor, *conditions: Tensor) -> Tensor:
        """Predict.

        x: (B, C, F, H, W) noised latents of a shape that ``config.check_latents`` accepts; t: (B,) or, one for all,
        (1,) times from 0 (data) to 1000 (noise), not necessarily whole, or (B, N), one for each token; conditions: in
        the order of ``config.conditions``: labels (B,) int; text (B, L, text_dim) or (B, 1, L, text_dim) states of the
        text encoder, with attention to all states. Returns (B, out_channels, F, H, W) in the dtype of the weights.
        """
        return self.predict(x, t, conditions)

    def predict(self, x: Tensor, t: Tensor, conditions: tuple[Tensor, ...], image: Tensor | None = None) -> Tensor:
        """Return what ``forward`` does, with labels and text in ``conditions``; image: embedded features (B, L, D)."""
        (B, _, F, H, W), (p, q, r) = x.shape, self.config.patch_size
        f, h, w = F // p, H // q, W // r
        if self.config.text_dim is not None:
            states = ops.reshape(conditions[-1], (B, -1, conditions[-1].shape[-1]))  # (B, L, text_dim)
            conditions = (*conditions[:-1], states)
        each = t.ndim == 2  # one time per token
        times = t if each else t[:, None]  # (B, n)
        time, modulation, text = self.condition_embedder(times, *conditions)  # (B, n, D), (B, n, 6 D), (B, L, D)
        if each:
            modulation = ops.split_tokens(modulation)  # (B, N, 6 D)
        cos, sin = self.rope(f, h, w)  # 2 x (N, d / 2)
        x = ops.split_tokens(self.patch_embedding(x))  # (B, N, D); N / ranks with context parallelism
        for block in self.blocks:
            x = block(x, text, modulation, cos, sin, image)  # (B, N, D)
        time = ops.split_tokens(time) if each else time  # (B, n, D)
        shift, scale = (row + time for row in ops.chunk(self.scale_shift_table, 2, 1))  # 2 x (B, n, D)
        x = ops.gather_tokens(self.proj_out(ops.addcmul(shift, self.norm_out(x), 1 + scale)))  # (B, N, p q r C)
        x = ops.reshape(x, (B, f, h, w, p, q, r, -1))  # (B, f, h, w, p, q, r, C)
        return ops.reshape(ops.permute(x, (0, 7, 1, 4, 2, 5, 3, 6)), (B, -1, F, H, W))  # (B, C, F, H, W)


class WanBlock(VideoBlock):
    """Modulated norms have no weights; the cross-attention's input has a separate norm, with weights."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__(config, affine=False, added=config.added_kv_proj_dim)
        self.norm2 = nn.LayerNorm(config.hidden_size, eps=config.eps, elementwise_affine=True)

    def cross_attention_input(self, x: Tensor, normed: Tensor) -> Tensor:
        return self.norm2(x)


class Wan(VideoTransformer):
    """Wan's transformer."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__(config, WanBlock)
        if config.image_dim:
            embedder = ImageEmbedder(config.image_dim, config.hidden_size, config.pos_embed_seq_len)
            self.condition_embedder.image_embedder = embedder

    def forward(self, x: Tensor, t: Tensor, *conditions: Tensor) -> Tensor:
        """Predict, as every video transformer, with conditioning frames and image features if the config names them.

        conditions: text; ``frames`` (B, M + C, F, H, W), mask and latents of the conditioning frames; ``image_embeds``
        (B, L, image_dim).
        """
        image: Tensor | None = None
        if self.config.image_dim:
            conditions, image = conditions[:-1], self.condition_embedder.image_embedder(conditions[-1])  # (B, L, D)
        if self.config.mask_channels:
            conditions, frames = conditions[:-1], conditions[-1]
            x, t = self.insert_frames(x, t, frames) if self.config.expand_timesteps else (ops.cat([x, frames], 1), t)
        return self.predict(x, t, conditions, image)

    def insert_frames(self, x: Tensor, t: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
        """Insert conditioning frames into latents (B, C, F, H, W); also return times (B, N) of tokens, 0 for theirs."""
        mask, (p, q, r) = frames[:, :1], self.config.patch_size  # (B, 1, F, H, W)
        known_tokens = ops.reshape(mask[:, 0, ::p, ::q, ::r], (mask.shape[0], -1))  # (B, N)
        return mask * frames[:, 1:] + (1 - mask) * x, (1 - known_tokens) * t[:, None]


class CustomDiTBlock(VideoBlock):
    """Modulated norms have weights; cross-attention has the same input as self-attention."""

    def __init__(self, config: CustomDiTConfig) -> None:
        super().__init__(config, affine=True)

    def cross_attention_input(self, x: Tensor, normed: Tensor) -> Tensor:
        return normed


class CustomDiT(VideoTransformer):
    """The tutorial's transformer."""

    def __init__(self, config: CustomDiTConfig) -> None:
        super().__init__(config, CustomDiTBlock)
