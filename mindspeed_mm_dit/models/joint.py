"""Layers of transformers in which the tokens of an image and of a text attend to each other (Esser et al. 2024).

Parameters have diffusers' names. Letters: B batch, C channels, H W height and width of latents, N tokens of the image,
L of the text, D width of a token, d of a head, c the condition (B, D).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.predictor import ZEROS, Normal
from mindspeed_mm_dit.framework import nn, ops
from mindspeed_mm_dit.models.layers import (
    FeedForward,
    TwoLayerMlp,
    attend,
    merge_heads,
    modulate,
    self_attention,
    split_heads,
    timestep_embedding,
)
from mindspeed_mm_dit.models.positions import FREQUENCY_WIDTH, timestep_frequencies

Tensor = Any  # a tensor of the active framework
TIMESTEP_SCALE = 1000
"""Times and guidance come in units of 1, and are embedded in units of 1/1000."""
EPS = 1e-6


def pack(x: Tensor) -> Tensor:
    """Cut latents (B, C, H, W) into patches of 2 x 2: (B, N, 4 C), channels 4 c + 2 row + column."""
    B, C, H, W = x.shape
    x = ops.reshape(x, (B, C, H // 2, 2, W // 2, 2))  # (B, C, h, 2, w, 2)
    return ops.reshape(ops.permute(x, (0, 2, 4, 1, 3, 5)), (B, -1, 4 * C))  # (B, N, 4 C)


def unpack(x: Tensor, h: int, w: int) -> Tensor:
    """Undo :func:`pack` for h x w patches."""
    x = ops.reshape(x, (x.shape[0], h, w, -1, 2, 2))  # (B, h, w, C, 2, 2)
    return ops.reshape(ops.permute(x, (0, 3, 1, 4, 2, 5)), (x.shape[0], -1, 2 * h, 2 * w))  # (B, C, H, W)


def nonzero_mask(text: Tensor) -> Tensor:
    """Return which states of a text (B, L, D) are not all zeros, (B, L) bool."""
    (B, L, D), squares = text.shape, ops.stop_gradient(text * text)
    return ops.reshape(ops.mean_per_sample(ops.reshape(squares, (B * L, D))), (B, L)) > 0


@ops.from_host(lambda count, length: (1, length))
def prefix_mask(count: int, length: int) -> np.ndarray:
    """Return a mask of the first ``count`` of ``length`` tokens, (1, length) bool."""
    return (np.arange(length) < count)[None]


def pad_to_multiple(text: Tensor) -> Tensor:
    """Pad a text (B, L, D) with zeros to a multiple of the context-parallel ranks."""
    padding = -text.shape[1] % ops.context_parallel_size()
    return ops.pad(text, (0, 0, 0, padding)) if padding else text


def padding_mask(L: int, whole: int, N: int) -> Tensor | None:
    """Return the mask (1, 1, 1, whole + N) of L tokens of text padded to ``whole``, then an image; None if unneeded."""
    return None if whole == L else ops.cat([prefix_mask(L, whole), prefix_mask(N, N)], 1)[:, None, None]


def concat_tokens(first: Tensor, second: Tensor) -> Tensor:
    """Concatenate a rank's tokens of text (B, L, D) and image (B, N, D) to its part of one sequence (B, L + N, D)."""
    return ops.split_tokens(ops.cat([ops.gather_tokens(first), ops.gather_tokens(second)], 1))


def image_tokens(x: Tensor, L: int) -> Tensor:
    """Return a rank's tokens of the image (B, N, D) behind a text of L tokens in one sequence."""
    return ops.split_tokens(ops.gather_tokens(x)[:, L:])


def add_gated(x: Tensor, gate: Tensor, change: Tensor) -> Tensor:
    """Add a ``change`` (B, N, D) to tokens (B, N, D), times a gate (B, D)."""
    return ops.addcmul(x, gate[:, None], change)


def add_residual(x: Tensor, attended: Tensor, parts: tuple[Tensor, ...], norm: Any, mlp: Any) -> Tensor:
    """Add the output of attention to tokens (B, N, D), then an MLP of the sum; parts: six (B, D), the last four are
    gate, shift, scale, gate."""
    x = add_gated(x, parts[2], attended)  # (B, N, D)
    return add_gated(x, parts[5], mlp(modulate(norm(x), parts[3], parts[4])))  # (B, N, D)


def plain_norm(width: int) -> Any:
    """Return a LayerNorm without weights."""
    return nn.LayerNorm(width, eps=EPS, elementwise_affine=False)


class TimeTextEmbedding(nn.Module):
    """The condition of a sample: its time and, if there are any, its pooled text and the strength of guidance."""

    def __init__(
        self,
        width: int,
        pooled: int | None = None,
        guidance: bool = False,
        codes: int = FREQUENCY_WIDTH,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.timestep_embedder = TwoLayerMlp(codes, width, nn.SiLU(), Normal(0.02), bias)
        self.is_guided, self.is_pooled = guidance, pooled is not None
        if guidance:
            self.guidance_embedder = TwoLayerMlp(codes, width, nn.SiLU(), Normal(0.02), bias)
        if pooled is not None:
            self.text_embedder = TwoLayerMlp(pooled, width, nn.SiLU(), Normal(0.02))
        nn.set_constant(self, "frequencies", (codes // 2,), lambda: timestep_frequencies(codes))

    def forward(self, t: Tensor, pooled: Tensor = None, guidance: Tensor = None) -> Tensor:
        """Return (B, D) from times (B,), pooled text (B, P) and strengths (B,) or (1,)."""
        c = self.timestep_embedder(timestep_embedding(TIMESTEP_SCALE * t, self.frequencies))  # (B, D)
        if self.is_guided:
            c = c + self.guidance_embedder(timestep_embedding(TIMESTEP_SCALE * guidance, self.frequencies))  # (B, D)
        return c + self.text_embedder(pooled) if self.is_pooled else c


class AdaLayerNormZero(nn.Module):
    """A norm of tokens, shifted and scaled by a condition; also returns further gates, shifts and scales."""

    def __init__(self, width: int, parts: int) -> None:
        super().__init__()
        self.parts = parts
        self.act = nn.SiLU()
        self.linear = nn.Linear(width, parts * width, init=ZEROS, matrices=parts)
        self.norm = plain_norm(width)

    def forward(self, x: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        """Return the tokens (B, N, D), then the other parts (B, D)."""
        parts = ops.chunk(self.linear(self.act(c)), self.parts, 1)  # parts x (B, D)
        return (modulate(self.norm(x), parts[0], parts[1]), *parts[2:])


class AdaLayerNormContinuous(nn.Module):
    """A norm of tokens, scaled and shifted by a condition: the scale comes first."""

    def __init__(self, width: int, bias: bool = True) -> None:
        super().__init__()
        self.act = nn.SiLU()
        self.linear = nn.Linear(width, 2 * width, bias=bias, init=ZEROS, matrices=2)
        self.norm = plain_norm(width)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        scale, shift = ops.chunk(self.linear(self.act(c)), 2, 1)  # 2 x (B, D)
        return modulate(self.norm(x), shift, scale)  # (B, N, D)


class Attention(nn.Module):
    """Self-attention with norms of queries and keys per head; without ``out`` no linear layer follows."""

    def __init__(
        self, width: int, num_heads: int, qk_norm: bool = True, out: bool = True, bias: bool = True, eps: float = EPS
    ) -> None:
        super().__init__()
        self.num_heads, self.qk_norm, self.out = num_heads, qk_norm, out
        if qk_norm:
            self.norm_q, self.norm_k = (nn.RMSNorm(width // num_heads, eps=eps) for _ in range(2))
        self.to_q = nn.Linear(width, width, bias=bias)
        self.to_k = nn.Linear(width, width, bias=bias)
        self.to_v = nn.Linear(width, width, bias=bias)
        if out:
            self.to_out = nn.Sequential(nn.Linear(width, width, bias=bias))

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of tokens (B, N, D), each (B, heads, N, d)."""
        q, k, v = (split_heads(each, self.num_heads) for each in (self.to_q(x), self.to_k(x), self.to_v(x)))
        return (self.norm_q(q), self.norm_k(k), v) if self.qk_norm else (q, k, v)

    def forward(
        self, x: Tensor, cos: Tensor | None = None, sin: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Return tokens (B, N, D); cos, sin: rotary positions (N, d / 2), if used; mask: (B, 1, 1, N), if used."""
        q, k, v = self.heads(x)
        x = merge_heads(self_attention(q, k, v, cos, sin, mask))  # (B, N, D)
        return self.to_out(x) if self.out else x


class JointAttention(Attention):
    """Attention over a text and an image with separate weights; the last one returns no text (context_pre_only)."""

    def __init__(
        self, width: int, num_heads: int, qk_norm: bool = True, is_last: bool = False, bias: bool = True
    ) -> None:
        super().__init__(width, num_heads, qk_norm, bias=bias)
        self.is_last = is_last
        if qk_norm:
            self.norm_added_q, self.norm_added_k = (nn.RMSNorm(width // num_heads, eps=EPS) for _ in range(2))
        self.add_q_proj = nn.Linear(width, width, bias=bias)
        self.add_k_proj = nn.Linear(width, width, bias=bias)
        self.add_v_proj = nn.Linear(width, width, bias=bias)
        if is_last:
            self.end_text()
        else:
            self.to_add_out = nn.Linear(width, width, bias=bias)

    def end_text(self) -> None:
        """Freeze the text's queries, whose output is not used after the last block."""
        nn.freeze_parameters(self.add_q_proj)
        if self.qk_norm:
            nn.freeze_parameters(self.norm_added_q)

    def text_heads(self, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of a text (B, L, D), each (B, heads, L, d)."""
        projected = (self.add_q_proj(text), self.add_k_proj(text), self.add_v_proj(text))
        q, k, v = (split_heads(each, self.num_heads) for each in projected)
        return (self.norm_added_q(q), self.norm_added_k(k), v) if self.qk_norm else (q, k, v)

    def forward(  # type: ignore[override]
        self, x: Tensor, text: Tensor, cos: Tensor | None = None, sin: Tensor | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return image (B, N, D) and text (B, L, D), which is None if ``is_last``.

        cos, sin: rotary positions of text, then image (L + N, d / 2), if used; mask: (B, 1, 1, L + N), if used.
        """
        L, pairs = text.shape[1] * ops.context_parallel_size(), zip(self.text_heads(text), self.heads(x))
        q, k, v = (ops.cat([ops.tokens_to_heads(part) for part in pair], 2) for pair in pairs)  # (B, heads, L + N, d)
        both = attend(q, k, v, cos, sin, mask)  # (B, heads, L + N, d)
        attended = merge_heads(ops.heads_to_tokens(both[:, :, L:]))  # (B, N, D)
        if self.is_last:
            return self.to_out(attended), None
        return self.to_out(attended), self.to_add_out(merge_heads(ops.heads_to_tokens(both[:, :, :L])))


class JointBlock(nn.Module):
    """Attention of image and text to both, then an MLP for each; the condition sets shift, scale and gate of all.

    is_last: the text is only attended to, and not updated. is_dual: the image also attends to itself alone.
    """

    def __init__(
        self, width: int, num_heads: int, qk_norm: bool = True, is_last: bool = False, is_dual: bool = False
    ) -> None:
        super().__init__()
        self.is_last, self.is_dual = is_last, is_dual
        self.norm1 = AdaLayerNormZero(width, 9 if is_dual else 6)
        self.norm1_context = AdaLayerNormContinuous(width) if is_last else AdaLayerNormZero(width, 6)
        self.attn = JointAttention(width, num_heads, qk_norm, is_last)
        if is_dual:
            self.attn2 = Attention(width, num_heads, qk_norm)
        self.norm2 = plain_norm(width)
        self.ff = FeedForward(width, 4 * width, width)
        if not is_last:
            self.norm2_context = plain_norm(width)
            self.ff_context = FeedForward(width, 4 * width, width)

    def forward(
        self,
        text: Tensor,
        x: Tensor,
        c: Tensor,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return text (B, L, D), unchanged if ``is_last``, and image (B, N, D); see :class:`JointAttention`."""
        image: Any = self.norm1(x, c)  # (B, N, D), then 4 or 7 x (B, D): gate, shift, scale, gate, ...
        words: Any = (self.norm1_context(text, c),) if self.is_last else self.norm1_context(text, c)
        attended, text_attended = self.attn(image[0], words[0], cos, sin, mask)  # (B, N, D), (B, L, D)
        alone = self._image_self_attention(x, image) if self.is_dual else 0
        x = add_gated(x, image[1], attended) + alone  # (B, N, D)
        x = add_gated(x, image[4], self.ff(modulate(self.norm2(x), image[2], image[3])))  # (B, N, D)
        if not self.is_last:
            text = add_gated(text, words[1], text_attended)  # (B, L, D)
            text = add_gated(text, words[4], self.ff_context(modulate(self.norm2_context(text), words[2], words[3])))
        return text, x

    def _image_self_attention(self, x: Tensor, image: tuple[Tensor, ...]) -> Tensor:
        """Return the gated self-attention of the image, (B, N, D)."""
        shift, scale, gate = image[5], image[6], image[7]
        return gate[:, None] * self.attn2(modulate(self.norm1.norm(x), shift, scale))  # (B, N, D)
