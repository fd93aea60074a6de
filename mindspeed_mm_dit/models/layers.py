"""Layers that image and video transformers share. Letters: B batch, N tokens, D width of a token, d of a head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_mm_dit.configs.predictor import XAVIER_UNIFORM, ZEROS, Initializer, Normal
from mindspeed_mm_dit.configs.tuning import LoraSpec
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.framework import nn, ops
from mindspeed_mm_dit.models.positions import FREQUENCY_WIDTH, timestep_frequencies

Tensor = Any  # a tensor of the active framework


def timestep_embedding(t: Tensor, frequencies: Tensor) -> Tensor:
    """Return the sinusoids of times (B,) of any scale: cosines, then sines, (B, 2 x frequencies) float32."""
    angles = ops.to_float32(t)[:, None] * frequencies[None]  # (B, frequencies)
    return ops.cat([ops.cos(angles), ops.sin(angles)], 1)


class TimestepEmbedder(nn.Module):
    """Embed timesteps: sinusoids, then a two-layer MLP; ``inner``: width between its layers, by default the last."""

    def __init__(self, width: int, inner: int | None = None) -> None:
        super().__init__()
        inner, codes = inner or width, FREQUENCY_WIDTH
        layers = nn.Linear(codes, inner, init=Normal(0.02)), nn.SiLU(), nn.Linear(inner, width, init=Normal(0.02))
        self.mlp = nn.Sequential(*layers)
        nn.set_constant(self, "frequencies", (codes // 2,), lambda: timestep_frequencies(codes))

    def forward(self, t: Tensor) -> Tensor:
        return self.mlp(ops.cast_like(self.code(t), self.mlp[0].weight))  # (B, D)

    def code(self, t: Tensor) -> Tensor:
        """Return the sinusoids of timesteps (B,) of any scale."""
        return timestep_embedding(t, self.frequencies)  # (B, 256)


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, N, D) -> (B, heads, N, d)."""
    B, N, D = x.shape
    return ops.permute(ops.reshape(x, (B, N, num_heads, D // num_heads)), (0, 2, 1, 3))


def merge_heads(x: Tensor) -> Tensor:
    """(B, heads, N, d) -> (B, N, D)."""
    x = ops.permute(x, (0, 2, 1, 3))  # (B, N, heads, d)
    return ops.reshape(x, (x.shape[0], x.shape[1], -1))


def self_attention(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, mask: Tensor | None = None
) -> Tensor:
    """Self-attention of a sample's tokens, context-parallel if ranks share it; arguments as of :func:`attend`."""
    q, k, v = ops.tokens_to_heads(q), ops.tokens_to_heads(k), ops.tokens_to_heads(v)
    return ops.heads_to_tokens(attend(q, k, v, cos, sin, mask))


def attend(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, mask: Tensor | None = None
) -> Tensor:
    """Attention among all tokens of a sample: q, k, v and the result are (B, heads, N, d).

    cos, sin: rotary positions (N, d / 2), if used. mask: (B, 1, 1, N), false for tokens to leave out.
    """
    if cos is not None:
        q, k = ops.rotary(q, cos, sin), ops.rotary(k, cos, sin)
    return ops.attention(ops.cast_like(q, v), ops.cast_like(k, v), v, mask)


def to_tokens(x: Tensor) -> Tensor:
    """(B, D, h, w) -> (B, N, D), row by row."""
    x = ops.reshape(x, (x.shape[0], x.shape[1], -1))  # (B, D, N)
    # PyTorch's CPU attention has wrong gradients if the last axis is not contiguous (pytorch/pytorch#187506).
    return ops.contiguous(ops.permute(x, (0, 2, 1)))  # (B, N, D)


def unpatchify(x: Tensor, grid: tuple[int, int], patch_size: int) -> Tensor:
    """Arrange the patches (B, N, P P C) of a grid as an image (B, C, H, W)."""
    (h, w), P = grid, patch_size
    x = ops.reshape(x, (x.shape[0], h, w, P, P, -1))  # (B, h, w, P, P, C)
    x = ops.permute(x, (0, 5, 1, 3, 2, 4))  # (B, C, h, P, w, P)
    return ops.reshape(x, (x.shape[0], -1, h * P, w * P))  # (B, C, H, W)


def modulate(x: Tensor, shift: Tensor | None, scale: Tensor) -> Tensor:
    """Scale and, unless ``shift`` is None, shift normalised tokens (B, N, D) by per-sample vectors (B, D)."""
    if shift is None:
        return x * (1 + scale[:, None])
    return ops.addcmul(shift[:, None], x, 1 + scale[:, None])


class SwiGLU(nn.Module):
    """An MLP whose one half gates the other (Shazeer 2020)."""

    def __init__(self, width: int, hidden_size: int) -> None:
        super().__init__()
        self.w12 = nn.Linear(width, 2 * hidden_size, matrices=2)
        self.act = nn.SiLU()
        self.w3 = nn.Linear(hidden_size, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = ops.chunk(self.w12(x), 2, -1)  # 2 x (B, N, hidden)
        return self.w3(self.act(gate) * value)  # (B, N, D)


class TwoLayerMlp(nn.Module):
    """Two linear layers around an activation."""

    def __init__(
        self, in_features: int, hidden_size: int, activation: Any, init: Initializer = XAVIER_UNIFORM, bias: bool = True
    ) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(in_features, hidden_size, bias=bias, init=init)
        self.activation = activation
        self.linear_2 = nn.Linear(hidden_size, hidden_size, bias=bias, init=init)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear_1(ops.cast_like(x, self.linear_1.weight))  # (..., D)
        return self.linear_2(self.activation(x))  # (..., D)


class Projection(nn.Module):
    """The linear layer ``proj``, a separate module as in diffusers' names."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.proj = nn.Linear(in_features, out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x)


class FeedForward(nn.Module):
    """Two linear layers, ``net.0.proj`` and ``net.2``, around a GELU."""

    def __init__(self, width: int, ffn_dim: int, out: int, approximate: str = "tanh") -> None:
        super().__init__()
        self.net = nn.Sequential(Projection(width, ffn_dim), nn.GELU(approximate=approximate), nn.Linear(ffn_dim, out))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # (B, N, D)


class FullWidthNormAttention(nn.Module):
    """Multi-head attention that norms queries and keys over the whole width, before splitting them into heads.

    ``added``: width of a second source, with separate keys and values; the outputs of both are summed.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        eps: float,
        init_out: Initializer = XAVIER_UNIFORM,
        added: int | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.to_q = nn.Linear(hidden_size, hidden_size)
        self.to_k = nn.Linear(hidden_size, hidden_size)
        self.to_v = nn.Linear(hidden_size, hidden_size)
        self.to_out = nn.Sequential(nn.Linear(hidden_size, hidden_size, init=init_out))
        self.norm_q = nn.RMSNorm(hidden_size, eps=eps)
        self.norm_k = nn.RMSNorm(hidden_size, eps=eps)
        if added is not None:
            self.add_k_proj = nn.Linear(added, hidden_size)
            self.add_v_proj = nn.Linear(added, hidden_size, init=ZEROS)  # (adding the source changes no output)
            self.norm_added_k = nn.RMSNorm(hidden_size, eps=eps)

    def forward(
        self,
        x: Tensor,
        source: Tensor,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
        second: Tensor | None = None,
    ) -> Tensor:
        """Attend from ``x`` (B, N, D) to ``source`` (B, M, D), and to a ``second`` source (B, L, added), if any.

        cos, sin: rotary positions (N, d / 2) for self-attention of a video, which may be context-parallel.
        """
        q = split_heads(self.norm_q(self.to_q(x)), self.num_heads)  # (B, heads, N, d)
        k = split_heads(self.norm_k(self.to_k(source)), self.num_heads)  # (B, heads, M, d)
        v = split_heads(self.to_v(source), self.num_heads)  # (B, heads, M, d)
        if cos is None:  # cross-attention: each token attends to the text by itself
            x = ops.attention(ops.cast_like(q, v), ops.cast_like(k, v), v)  # (B, heads, N, d)
        else:
            x = self_attention(q, k, v, cos, sin)  # (B, heads, N, d)
        if second is not None:
            k = split_heads(self.norm_added_k(self.add_k_proj(second)), self.num_heads)  # (B, heads, L, d)
            v = split_heads(self.add_v_proj(second), self.num_heads)  # (B, heads, L, d)
            x = x + ops.attention(ops.cast_like(q, v), ops.cast_like(k, v), v)  # (B, heads, N, d)
        return self.to_out(merge_heads(x))  # (B, N, D)


class LoraLinear(nn.Module):
    """A linear layer, whose parameter names stay, with an adapter: x W^T + b + scale (x A^T) B^T (Hu et al., eq. 3)."""

    def __init__(self, layer: Any, spec: LoraSpec) -> None:
        super().__init__()
        out_features, in_features = layer.weight.shape
        self.scale = spec.scale
        self.weight, self.bias = layer.weight, layer.bias
        self.lora_A = nn.Linear(in_features, spec.rank, bias=False)
        self.lora_B = nn.Linear(spec.rank, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        change = self.lora_B(self.lora_A(x))  # (..., out)
        return ops.linear(x, self.weight, self.bias) + self.scale * change  # (..., out)


def add_lora(network: Any, adapters: Mapping[str, LoraSpec]) -> Any:
    """Add an adapter to each layer that ``adapters`` names, in place; its values are loaded later.

    Raises ConfigError for a layer that is not a linear layer of the framework.
    """
    modules = dict(network.named_modules())
    for name, spec in adapters.items():
        layer = modules.get(name)
        if not isinstance(layer, nn.Linear):
            kind = "absent" if layer is None else f"a {type(layer).__name__}"
            raise ConfigError(
                f"The adapter for {name} needs a Linear of framework.nn, but in the network it is {kind}."
            )
        owner, _, attribute = name.rpartition(".")
        _set_module(modules[owner], attribute, LoraLinear(layer, spec))
    return network


def _set_module(owner: Any, name: str, module: Any) -> None:
    if name.isdecimal():  # in a ModuleList or Sequential
        owner[int(name)] = module
    else:
        setattr(owner, name, module)
