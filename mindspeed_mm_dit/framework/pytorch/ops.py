"""Functions of tensors: PyTorch's own, under the names of the contract."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from torch import (
    Tensor,
    broadcast_to,
    cat,
    chunk,
    clamp,
    clear_autocast_cache,
    compiler,
    complex,
    cos,
    exp,
    expm1,
    float64,
    log,
    no_grad,
    permute,
    reshape,
    sigmoid,
    sin,
    stack,
    tanh,
    view_as_complex,
    view_as_real,
    where,
)
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cosine_similarity, interpolate, pad
from torch.nn.functional import scaled_dot_product_attention as attention

from mindspeed_mm_dit.configs.predictor import Shape
from mindspeed_mm_dit.framework.pytorch import runtime
from mindspeed_mm_dit.framework.pytorch.nn import addcmul, linear
from mindspeed_mm_dit.framework.pytorch.sequence import (
    context_parallel_size,
    gather_tokens,
    heads_to_tokens,
    split_tokens,
    tokens_to_heads,
)

__all__ = [
    "addcmul", "attention", "broadcast_to", "cast_like", "cat", "chunk", "clamp", "context_parallel_size",
    "contiguous", "cos", "cosine_similarity", "derivative_along", "exp", "expm1", "from_host", "gather_tokens",
    "heads_to_tokens", "linear", "log", "mean_per_sample", "no_grad", "numpy", "pad", "permute", "reshape", "rotary",
    "sigmoid", "sin", "split_tokens", "stop_gradient", "take", "tanh", "tensor", "to_float32", "tokens_to_heads",
    "upsample_nearest_2x", "where", "without_gradient",
]  # fmt: skip


def mean_per_sample(x: Tensor) -> Tensor:
    """Return the mean over every axis but the first: (B, ...) -> (B,)."""
    return x.flatten(1).mean(1)


def contiguous(x: Tensor) -> Tensor:
    """Return ``x`` laid out in the order of its axes."""
    return x.contiguous()


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of neighbours on the last axis (Su et al. 2021): x (B, heads, N, d), cos and sin (N, d / 2)."""
    pairs = x.unflatten(-1, (-1, 2))  # (B, heads, N, d / 2, 2)
    if compiler.is_compiling():
        a, b = pairs[..., 0], pairs[..., 1]
        return stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    if x.device.type in ("cpu", "cuda"):  # one complex product: a fifth of the time on a CPU
        rotations = complex(to_float32(cos), to_float32(sin))  # (N, d / 2)
        return view_as_real(view_as_complex(pairs.to(rotations.real.dtype)) * rotations).flatten(-2)
    return addcmul(pairs * cos[..., None], pairs.flip(-1), stack([-sin, sin], -1)).flatten(-2)


def take(table: Tensor, index: Tensor) -> Tensor:
    """Return the rows ``index`` of the 1-D ``table``."""
    return table[index]


def upsample_nearest_2x(x: Tensor) -> Tensor:
    """Repeat each pixel four times: (B, C, H, W) -> (B, C, 2H, 2W)."""
    return interpolate(x, scale_factor=2.0, mode="nearest")


def stop_gradient(x: Tensor) -> Tensor:
    """Return the same values, through which no gradient flows."""
    return x.detach()


def without_gradient(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return the result of ``function`` on ``inputs``, through which no gradient flows."""
    with no_grad():
        result = function(*inputs)
    _clear_autocast_cache()
    return result


def derivative_along(
    function: Callable[..., Tensor], inputs: tuple[Tensor, ...], tangents: tuple[Tensor, ...]
) -> Tensor:
    """Return the derivative of ``function`` along ``tangents``, in forward mode; no gradient flows through it.

    Fused attention has no such derivative, so its plain form is used meanwhile.
    """
    with no_grad(), forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
        result = function(*(forward_ad.make_dual(x, tangent) for x, tangent in zip(inputs, tangents)))
        derivative = forward_ad.unpack_dual(result).tangent
    _clear_autocast_cache()
    return derivative


def _clear_autocast_cache() -> None:
    """Drop the weights that autocast has cast without a gradient: PyTorch 2.7 would reuse them, and train nothing."""
    clear_autocast_cache()


def to_float32(x: Tensor) -> Tensor:
    """Return ``x`` in float32; float64 stays float64 (``mm-dit prove``)."""
    return x if x.dtype == float64 else x.float()


def cast_like(x: Tensor, y: Tensor) -> Tensor:
    """Return ``x`` in the dtype of ``y``."""
    return x.to(y.dtype)


def tensor(array: np.ndarray) -> Tensor:
    """Return ``array`` as a tensor on the runtime's device, without waiting for the copy."""
    return runtime.to_device({"array": array})["array"]


def from_host(shape: Callable[..., Shape]) -> Callable[[Callable[..., np.ndarray]], Callable[..., Tensor]]:
    """Let a function of integers that makes an array return a tensor; only the meta backend needs ``shape``."""

    def on_device(make: Callable[..., np.ndarray]) -> Callable[..., Tensor]:
        cached = lru_cache(maxsize=64)(make)
        return lambda *numbers: tensor(cached(*numbers))

    return on_device


def numpy(x: Tensor) -> np.ndarray:
    """Return ``x`` as an array on the host; low-precision floats come as float32."""
    x = x.detach().cpu()
    return (x.float() if x.is_floating_point() and x.dtype.itemsize < 4 else x).numpy()
