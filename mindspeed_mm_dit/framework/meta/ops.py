"""Functions of tensors on the meta backend: shapes of results, multiply-adds, and the tensors saved for backward.

The saved tensors are those that PyTorch's operators save.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mindspeed_mm_dit.framework.meta.tensor import (
    Shape,
    Storage,
    Tensor,
    broadcast,
    current,
    dense_like,
    elementwise,
    operator_result,
    promote_dtypes,
    saved_factors,
    view_strides,
)


def _keeping_input(x: Tensor) -> Tensor:
    return elementwise(x, keeps=[x])


def _keeping_result(x: Tensor) -> Tensor:
    output = elementwise(x)
    if output.needs_gradient:
        current().save(output.storage)
    return output


log = sin = cos = silu = gelu = _keeping_input
exp = expm1 = sigmoid = tanh = _keeping_result


def cat(tensors: Sequence[Tensor], dim: int) -> Tensor:
    shape = list(tensors[0].shape)
    shape[dim] = sum(x.shape[dim] for x in tensors)
    return operator_result(shape, promote_dtypes(*(x.dtype for x in tensors)), tensors)


def chunk(x: Tensor, parts: int, dim: int) -> tuple[Tensor, ...]:
    shape = list(x.shape)
    shape[dim] //= parts
    return tuple(x.view(shape, x.strides) for _ in range(parts))


def reshape(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return ``x`` in another shape, as a view if its layout allows it; one axis may be -1."""
    known = math.prod(size for size in shape if size != -1)
    sizes = tuple(x.num_elements // known if size == -1 else size for size in shape)
    if math.prod(sizes) != x.num_elements:
        raise ValueError(f"{x.shape} does not have as many elements as {tuple(shape)}")
    strides = view_strides(x, sizes)
    return operator_result(sizes, x.dtype, [x]) if strides is None else x.view(sizes, strides)


def permute(x: Tensor, axes: Sequence[int]) -> Tensor:
    return x.view([x.shape[axis] for axis in axes], [x.strides[axis] for axis in axes])


def contiguous(x: Tensor) -> Tensor:
    return x if view_strides(x, (x.num_elements,)) else operator_result(x.shape, x.dtype, [x])


def broadcast_to(x: Tensor, shape: Shape) -> Tensor:
    return x.view(shape, [0 if a != b else stride for a, b, stride in zip(x.shape, shape, x.strides)])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    x, weight = for_product(x), for_product(weight)
    if x.shape[-1] != weight.shape[-1]:
        raise ValueError(f"{x.shape} does not fit a weight of {weight.shape}")
    current().multiply_adds += x.num_elements * weight.shape[0]
    return operator_result((*x.shape[:-1], weight.shape[0]), x.dtype, [x, weight, bias], saved_factors(x, weight))


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int) -> Tensor:
    """Cross-correlation of (B, in, H, W) with filters (out, in, k, k)."""
    x, weight = for_product(x), for_product(weight)
    (B, _, H, W), (outputs, inputs, K, _) = x.shape, weight.shape
    h, w = ((side + 2 * padding - K) // stride + 1 for side in (H, W))
    current().multiply_adds += B * outputs * h * w * inputs * K * K
    return operator_result((B, outputs, h, w), x.dtype, [x, weight, bias], saved_factors(x, weight))


def for_product(x: Tensor) -> Tensor:
    """Return ``x`` as a matrix product takes it: in bfloat16 under autocast."""
    return _cast(x, "bfloat16") if current().autocast and x.dtype == "float32" else x


def for_norm(x: Tensor) -> Tensor:
    """Return ``x`` as a norm takes it: in float32 under autocast."""
    return _cast(x, "float32") if current().autocast else x


def _cast(x: Tensor, dtype: str) -> Tensor:
    if x.dtype == dtype:
        return x
    if x.storage.is_weight:
        return Tensor(x.shape, dtype, x.needs_gradient, Storage(0, is_weight=True))
    return operator_result(x.shape, dtype, [x])


def addcmul(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return elementwise(x, y, z, keeps=saved_factors(y, z))


def clamp(x: Tensor, min: float | None = None, max: float | None = None) -> Tensor:
    return _keeping_input(x)


def where(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    both = elementwise(x, y)
    return operator_result(broadcast(condition.shape, both.shape), both.dtype, [x, y], [condition])


def mean_per_sample(x: Tensor) -> Tensor:
    return operator_result(x.shape[:1], x.dtype, [x])


def cosine_similarity(x: Tensor, y: Tensor, dim: int) -> Tensor:
    both = elementwise(x, y, keeps=[x, y])
    axis = dim % both.ndim
    return operator_result([*both.shape[:axis], *both.shape[axis + 1 :]], both.dtype, [x, y])


def take(table: Tensor, index: Tensor) -> Tensor:
    return operator_result((*index.shape, *table.shape[1:]), table.dtype, [table], [index])


def pad(x: Tensor, widths: tuple[int, int, int, int]) -> Tensor:
    left, right, top, bottom = widths
    *outer, H, W = x.shape
    return operator_result((*outer, H + top + bottom, W + left + right), x.dtype, [x])


def upsample_nearest_2x(x: Tensor) -> Tensor:
    *outer, H, W = x.shape
    return operator_result((*outer, 2 * H, 2 * W), x.dtype, [x])


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(d)) v, fused: the scores are computed again in backward, from their log-sum-exp."""
    q, k, v = for_product(q), for_product(k), for_product(v)
    B, heads, N, d = q.shape
    current().multiply_adds += 2 * B * heads * N * k.shape[2] * d
    log_sum_exp = Tensor((B, heads, N))
    output = operator_result((B, heads, N, d), v.dtype, [q, k, v], [q, k, v, mask, log_sum_exp], strides=dense_like(q))
    if output.needs_gradient:
        current().save(output.storage)
    return output


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return operator_result(x.shape, promote_dtypes(x.dtype, cos.dtype), [x], [cos, sin], dense_like(x))


def norm(x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """Zero mean and unit variance of each of ``groups`` parts of ``x``; mean and variance are kept in float32."""
    x = for_norm(x)
    statistics = [Tensor((groups,)), Tensor((groups,))]
    return operator_result(x.shape, x.dtype, [x, weight, bias], [x, *statistics])


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """x / root mean square over the last axis, times weight: one kernel, as on a GPU."""
    x = for_norm(x)
    return operator_result(x.shape, x.dtype, [x, weight], [x, Tensor((*x.shape[:-1], 1))])


def context_parallel_size() -> int:
    return current().ranks


def split_tokens(x: Tensor) -> Tensor:
    return _exchanged(x, 1, None)


def gather_tokens(x: Tensor) -> Tensor:
    return _exchanged(x, None, 1)


def tokens_to_heads(x: Tensor) -> Tensor:
    return _exchanged(x, 1, 2)


def heads_to_tokens(x: Tensor) -> Tensor:
    return _exchanged(x, 2, 1)


def _exchanged(x: Tensor, split: int | None, joined: int | None) -> Tensor:
    """Return what ranks exchange: a part of axis ``split``, the whole of axis ``joined``."""
    ranks, shape = current().ranks, list(x.shape)
    if ranks == 1:
        return x
    if split is not None:
        shape[split] = -(-shape[split] // ranks)
    if joined is not None:
        shape[joined] *= ranks
    return operator_result(shape, x.dtype, [x])


def stop_gradient(x: Tensor) -> Tensor:
    """Return the same tensor, through which no gradient flows."""
    return Tensor(x.shape, x.dtype, False, x.storage, x.strides)


def without_gradient(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return the result of ``function``, through which no gradient flows."""
    with no_grad():
        return function(*inputs)


def derivative_along(
    function: Callable[..., Tensor], inputs: tuple[Tensor, ...], tangents: tuple[Tensor, ...]
) -> Tensor:
    """Return the derivative of ``function`` along ``tangents``: of the shape of its result."""
    return without_gradient(function, *inputs)


@contextmanager
def no_grad() -> Iterator[None]:
    """Record no gradient meanwhile."""
    trace = current()
    before, trace.with_gradient = trace.with_gradient, False
    yield
    trace.with_gradient = before


def to_float32(x: Tensor) -> Tensor:
    return _cast(x, "float32")


def cast_like(x: Tensor, y: Tensor) -> Tensor:
    return _cast(x, y.dtype)


def tensor(array: Any) -> Tensor:
    return Tensor(array.shape, str(array.dtype))


def from_host(shape: Callable[..., Shape]) -> Callable[[Callable[..., Any]], Callable[..., Tensor]]:
    """Let a function of integers that makes an array return a tensor; ``shape`` computes the array's shape."""
    return lambda make: lambda *numbers: Tensor(shape(*numbers))


def numpy(x: Tensor) -> Any:
    """Raise TypeError: there are no values on the meta backend."""
    raise TypeError("a tensor on the meta backend has no values")
