"""Layers that image and video transformers share. Letters: B batch, N tokens, D width of a token, d of a head."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.predictor import ONES, XAVIER_UNIFORM, ZEROS, Normal, Parameter, Parameters, Rule
from mindspeed_mm_dit.configs.tuning import LoraSpec
from mindspeed_mm_dit.data.order import philox
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.framework import nn, ops

Tensor = Any  # a tensor of the active framework


def timestep_code(t: Tensor, frequencies: Tensor) -> Tensor:
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
        return timestep_code(t, self.frequencies)  # (B, 256)


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


def as_tokens(x: Tensor) -> Tensor:
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


class TwoLayers(nn.Module):
    """Two linear layers around an activation."""

    def __init__(
        self, in_features: int, hidden_size: int, activation: Any, init: Rule = XAVIER_UNIFORM, bias: bool = True
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


class WholeAttention(nn.Module):
    """Multi-head attention that norms queries and keys over the whole width, before splitting them into heads.

    ``added``: width of a second source, with separate keys and values; the outputs of both are summed.
    """

    def __init__(
        self, hidden_size: int, num_heads: int, eps: float, init_out: Rule = XAVIER_UNIFORM, added: int | None = None
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


FREQUENCY_WIDTH = 256
"""Width of DiT's sinusoidal timestep embedding."""


def stretched_grid(height: int, width: int, base: int) -> tuple[np.ndarray, np.ndarray]:
    """Return row and column of each patch of a grid, each (height * width,), row by row.

    Both run from 0 to below ``base``, the side of the square that the positions were made for. Along a side of another
    length they are spaced more closely or widely (PixArt-alpha, Chen et al. 2023; rotary ones as EVA-02, Fang et al.
    2023).
    """
    rows, columns = np.divmod(np.arange(height * width), width)
    return rows * (base / height), columns * (base / width)


def sincos_positions_2d(width: int, base: int, grid: tuple[int, int] | None = None) -> np.ndarray:
    """Return DiT's frozen position embedding, (tokens, width) float32, of a square of side ``base`` or a ``grid``.

    The first half of each vector encodes the column, the second half the row (Peebles & Xie 2023, after MAE);
    each half is sin then cos of position * 10000**(-i / (width / 4)).
    """
    frequencies = 1.0 / 10000 ** (np.arange(width // 4, dtype=np.float64) / (width / 4))
    rows, columns = stretched_grid(*(grid or (base, base)), base)
    angles = [np.outer(position, frequencies) for position in (columns, rows)]
    return np.concatenate([f(angle) for angle in angles for f in (np.sin, np.cos)], axis=1).astype(np.float32)


def timestep_frequencies(width: int) -> np.ndarray:
    """Return the angular frequencies of the timestep embedding, (width / 2,) float32, from 1 down to 1 / 10000.

    The exponent is rounded to float32 before exp, as in the published model; at a timestep of 999 the difference
    would show.
    """
    half = width // 2
    exponent = np.float32(-math.log(10000)) * np.arange(half, dtype=np.float32) / np.float32(half)
    return np.exp(exponent.astype(np.float64)).astype(np.float32)


def rotary_tables_2d(
    head_dim: int, base: int, num_prefix: int = 0, grid: tuple[int, int] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return cosines and sines of rotary positions, each (num_prefix + tokens, head_dim / 2) float32, of a square of
    side ``base`` or a ``grid``.

    The first half of the pairs rotates with the row, the second with the column: pair i of n by position *
    10000**(-i / n), computed in float64. num_prefix: number of tokens before those of the grid, without a position.
    """
    pairs = head_dim // 4
    frequencies = 10000.0 ** (-np.arange(pairs) / pairs)
    rows, columns = stretched_grid(*(grid or (base, base)), base)
    angles = np.concatenate([np.outer(rows, frequencies), np.outer(columns, frequencies)], axis=1)
    angles = np.concatenate([np.zeros((num_prefix, 2 * pairs)), angles])
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def pairs_by_axis(head_dim: int) -> tuple[int, int, int]:
    """Return how many pairs of a head rotate with frames, rows and columns: a third of them each, frames the rest."""
    per_side = head_dim // 6
    return head_dim // 2 - 2 * per_side, per_side, per_side


def rotary_table(wave: Callable[[np.ndarray], np.ndarray], pairs: int, length: int) -> np.ndarray:
    """Return the cosines or sines (``wave``) of rotary positions along one axis, (length, pairs) float32.

    Pair i of n rotates by position * 10000**(-i / n), computed in float64 (Su et al. 2021, section 3.2.2).
    """
    angles = np.outer(np.arange(length), 10000.0 ** (-np.arange(pairs) / pairs))
    return wave(angles).astype(np.float32)


def grid_positions(h: int, w: int) -> np.ndarray:
    """Return (0, row, column) of each patch of a grid, row by row, (h w, 3)."""
    rows, columns = np.divmod(np.arange(h * w), w)
    return np.stack([np.zeros(h * w), rows, columns], 1)


def rotary_of_places(positions: np.ndarray, widths: tuple[int, ...], theta: float = 10000.0) -> np.ndarray:
    """Return rotary cosines, then sines, of tokens at ``positions`` (N, axes), (2, N, d / 2) float32.

    widths: rotary channels of a head per axis. Pair i of an axis of width n rotates by position * theta**(-2i / n),
    computed in float64.
    """
    angles = [np.outer(position, theta ** (-np.arange(0, n, 2) / n)) for position, n in zip(positions.T, widths)]
    all_angles = np.concatenate(angles, 1)
    return np.stack([np.cos(all_angles), np.sin(all_angles)]).astype(np.float32)


_STREAM = 0x1717  # keeps these draws apart from those of the data


def initial_weights(parameters: Parameters, seed: int) -> dict[str, np.ndarray]:
    """Return the initial value of each parameter, trained or not, float32, by its name in a checkpoint.

    seed: a whole number, at least 0.
    """
    return {name: initial_value(name, parameter, seed) for name, parameter in parameters.items()}


def initial_value(name: str, parameter: Parameter, seed: int) -> np.ndarray:
    """Return the initial value of one parameter, float32."""
    shape, rule = parameter.shape, parameter.initial
    if rule is ZEROS:
        return np.zeros(shape, np.float32)
    if rule is ONES:
        return np.ones(shape, np.float32)
    draw = philox((seed, _STREAM << 32 | zlib.crc32(name.encode())))
    if isinstance(rule, Normal):
        return draw.standard_normal(shape, np.float32) * np.float32(rule.std)
    if rule is XAVIER_UNIFORM:
        bound = math.sqrt(6 / (math.prod(shape[1:]) + shape[0]))  # (Glorot & Bengio 2010, eq. 16)
        return (draw.random(shape, np.float32) * 2 - 1) * np.float32(bound)
    return np.asarray(rule(draw, shape), np.float32).reshape(shape)  # type: ignore[operator]


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


def with_adapters(network: Any, adapters: Mapping[str, LoraSpec]) -> Any:
    """Add an adapter to each layer that ``adapters`` names, in place; its values are loaded later.

    Raises ConfigError for a layer that is not a linear layer of the framework.
    """
    modules = dict(network.named_modules())
    for name, spec in adapters.items():
        layer = modules.get(name)
        if not isinstance(layer, nn.Linear):
            kind = "absent" if layer is None else f"a {type(layer).__name__}"
            raise ConfigError(f"an adapter for {name}", f"in the network it is {kind}, not a Linear of framework.nn")
        owner, _, attribute = name.rpartition(".")
        _set_module(modules[owner], attribute, LoraLinear(layer, spec))
    return network


def _set_module(owner: Any, name: str, module: Any) -> None:
    if name.isdecimal():  # in a ModuleList or Sequential
        owner[int(name)] = module
    else:
        setattr(owner, name, module)
