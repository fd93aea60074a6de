"""Functions of tensors: MindSpore's, under the names of the contract, in forms that have CPU kernels."""

from __future__ import annotations

from collections.abc import Callable

import mindspore
import numpy as np
from mindspore import Tensor, float32, float64, mint
from mindspore import _no_grad as no_grad
from mindspore import ops as msops
from mindspore.ops import broadcast_to, cat, chunk, cos, pad, permute, reshape, sin, stop_gradient, where

from mindspeed_mm_dit.configs.predictor import Shape
from mindspeed_mm_dit.framework.mindspore import runtime
from mindspeed_mm_dit.framework.mindspore.runtime import ON_CPU

MASKED = -1e30
"""Score of masked keys: its exponential is 0, and the difference of two of them is defined."""

__all__ = [
    "addcmul", "attention", "broadcast_to", "cast_like", "cat", "chunk", "clamp", "context_parallel_size",
    "contiguous", "cos", "cosine_similarity", "derivative_along", "exp", "expm1", "from_host", "gather_tokens",
    "heads_to_tokens", "linear", "log", "mean_per_sample", "no_grad", "numpy", "pad", "permute", "reshape", "rotary",
    "sigmoid", "sin", "split_tokens", "stop_gradient", "take", "tanh", "tensor", "to_float32", "tokens_to_heads",
    "upsample_nearest_2x", "where", "without_gradient",
]  # fmt: skip


def _exact(x: Tensor) -> Tensor:
    """Return ``x`` in float64 on a CPU, whose float32 exp, log and the like are approximations."""
    return x.astype(float64) if ON_CPU else x


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b: (..., in) -> (..., out)."""
    if ON_CPU:
        return msops.dense(x, weight, bias)
    return mint.nn.functional.linear(x, weight, bias)  # Ascend's fast form; untested there


def exp(x: Tensor) -> Tensor:
    """e to the power ``x``."""
    return msops.exp(_exact(x)).astype(x.dtype)


def expm1(x: Tensor) -> Tensor:
    """e to the power ``x``, minus 1, accurate near 0."""
    return msops.expm1(_exact(x)).astype(x.dtype)


def log(x: Tensor) -> Tensor:
    """Natural logarithm of ``x``."""
    return msops.log(_exact(x)).astype(x.dtype)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-``x``)), accurate near 0."""
    return msops.sigmoid(_exact(x)).astype(x.dtype)


def tanh(x: Tensor) -> Tensor:
    """Hyperbolic tangent of ``x``."""
    return msops.tanh(_exact(x)).astype(x.dtype)


def addcmul(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """``x + y * z``; the graph compiler fuses it."""
    return x + y * z


def clamp(x: Tensor, min: float | None = None, max: float | None = None) -> Tensor:
    """``x`` bounded from below and above; None leaves a side open."""
    return msops.clamp(x, min, max)


def mean_per_sample(x: Tensor) -> Tensor:
    return msops.mean(msops.reshape(x, (x.shape[0], -1)), 1)


def cosine_similarity(x: Tensor, y: Tensor, dim: int) -> Tensor:
    """Cosine of the angle between the vectors along ``dim``."""
    norms = msops.sum(x * x, dim) * msops.sum(y * y, dim)
    return msops.sum(x * y, dim) * msops.rsqrt(msops.clamp(norms, min=1e-16))


def contiguous(x: Tensor) -> Tensor:
    """Return ``x``: MindSpore's operators lay their results out in the order of the axes."""
    return x


def take(table: Tensor, index: Tensor) -> Tensor:
    return msops.gather(table, index, 0)


def upsample_nearest_2x(x: Tensor) -> Tensor:
    return msops.interpolate(x, size=(2 * x.shape[2], 2 * x.shape[3]), mode="nearest")


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs = msops.reshape(x, (*x.shape[:-1], -1, 2))  # (B, heads, N, d / 2, 2)
    a, b = pairs[..., 0], pairs[..., 1]
    return msops.reshape(msops.stack([a * cos - b * sin, a * sin + b * cos], -1), x.shape)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(d)) v with q (B, heads, N, d), k and v (B, heads, M, d); nothing where ``mask`` is false."""
    if (
        not ON_CPU and mask is None and q.dtype in (mindspore.float16, mindspore.bfloat16)
    ):  # Ascend's fused form; untested
        return msops.flash_attention_score(q, k, v, q.shape[1], scalar_value=q.shape[-1] ** -0.5, input_layout="BNSD")
    # MindSpore 2.10 differentiates matmul three times slower, and not at all with one sample, one head and one key.
    scores = msops.BatchMatMul(transpose_b=True)(q * q.shape[-1] ** -0.5, k)  # (B, heads, N, M)
    if mask is not None:
        scores = msops.where(mask, scores, MASKED)
    return msops.BatchMatMul()(msops.softmax(scores, -1), v)  # (B, heads, N, d)


def without_gradient(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    return stop_gradient(function(*inputs))


def derivative_along(
    function: Callable[..., Tensor], inputs: tuple[Tensor, ...], tangents: tuple[Tensor, ...]
) -> Tensor:
    """Derivative of ``function`` as ``inputs`` change along ``tangents``; no gradient flows through it."""
    return stop_gradient(mindspore.jvp(function, inputs, tangents)[1])


def to_float32(x: Tensor) -> Tensor:
    """``x`` in float32."""
    return x.astype(float32)


def cast_like(x: Tensor, y: Tensor) -> Tensor:
    return x.astype(y.dtype)


def tensor(array: np.ndarray) -> Tensor:
    """``array`` as a tensor on the runtime's device."""
    return Tensor(array)


def from_host(shape: Callable[..., Shape]) -> Callable[[Callable[..., np.ndarray]], Callable[..., Tensor]]:
    """Let a function of integers return a tensor; a graph calls it when it is compiled."""

    def in_graph(make: Callable[..., np.ndarray]) -> Callable[..., Tensor]:
        @msops.constexpr
        def constant_tensor(*numbers: int) -> Tensor:
            return Tensor(make(*numbers))

        return constant_tensor

    return in_graph


def numpy(x: Tensor) -> np.ndarray:
    return runtime.to_host(x)


def context_parallel_size() -> int:
    """Return 1: ranks do not share samples (``runtime.HAS_CONTEXT_PARALLEL``)."""
    return 1


def split_tokens(x: Tensor) -> Tensor:
    """Return ``x``."""
    return x


gather_tokens = tokens_to_heads = heads_to_tokens = split_tokens
