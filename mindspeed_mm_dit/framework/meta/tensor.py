"""Tensors of the meta backend, which have a shape and no numbers, and the trace of what was computed with them."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

Shape = tuple[int, ...]
ITEM_BYTES = {"bool": 1, "int64": 8, "bfloat16": 2, "float32": 4}
"""Bytes of an element. Of two types, elementwise operators return the later one."""
_ORDER = list(ITEM_BYTES)


class Tensor:
    """A tensor of ``shape``; without ``storage`` and ``strides`` it has new memory, in row-major order."""

    def __init__(
        self,
        shape: Sequence[int],
        dtype: str = "float32",
        needs_gradient: bool = False,
        storage: Storage | None = None,
        strides: Shape | None = None,
    ) -> None:
        self.shape, self.dtype, self.needs_gradient = tuple(shape), dtype, needs_gradient
        self.storage = storage or Storage(math.prod(self.shape) * ITEM_BYTES[dtype])
        self.strides = row_major(self.shape) if strides is None else strides

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def view(self, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
        """Return a tensor that shares this one's memory."""
        return Tensor(shape, self.dtype, self.needs_gradient, self.storage, tuple(strides))

    def __getitem__(self, index: Any) -> Tensor:
        axes, shape, strides = list(zip(self.shape, self.strides)), list[int](), list[int]()
        for part in index if isinstance(index, tuple) else (index,):
            if part is None:
                shape.append(1)
                strides.append(0)
                continue
            size, stride = axes.pop(0)
            if isinstance(part, slice):
                chosen = range(size)[part]
                shape.append(len(chosen))
                strides.append(stride * chosen.step)
            else:
                range(size)[part]  # (raises IndexError, as a tensor does)
        return self.view([*shape, *(size for size, _ in axes)], [*strides, *(stride for _, stride in axes)])

    def __add__(self, other: Any) -> Tensor:
        return elementwise(self, other)

    def __mul__(self, other: Any) -> Tensor:
        return elementwise(self, other, keeps=saved_factors(self, other))

    def __truediv__(self, other: Any) -> Tensor:
        return elementwise(self, other, keeps=[other, *([self] if _needs(other) else [])])

    def __pow__(self, power: float) -> Tensor:
        return elementwise(self, keeps=[self])

    def __neg__(self) -> Tensor:
        return elementwise(self)

    def __gt__(self, other: Any) -> Tensor:
        return Tensor(self.shape, "bool")

    __radd__ = __sub__ = __rsub__ = __add__
    __rmul__ = __mul__


def operator_result(
    shape: Sequence[int], dtype: str, inputs: Sequence[Any], keeps: Sequence[Any] = (), strides: Shape | None = None
) -> Tensor:
    """Return the result of an operator on ``inputs``: a tensor with new memory.

    keeps: the tensors that backward needs, if a gradient is required. Entries of both that are not tensors are ignored.
    """
    trace = current()
    output = Tensor(shape, dtype, trace.with_gradient and any(map(_needs, inputs)), strides=strides)
    if output.needs_gradient:
        trace.widest_bytes = max(trace.widest_bytes, output.storage.num_bytes)
        for x in keeps:
            if isinstance(x, Tensor):
                trace.save(x.storage)
    return output


def elementwise(*inputs: Any, keeps: Sequence[Any] = ()) -> Tensor:
    """Return the result of elementwise work on tensors and numbers, with broadcasting; it lies in memory as they do."""
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    dtype = promote_dtypes(*(x.dtype for x in tensors))
    dtype = (
        promote_dtypes(dtype, "float32") if dtype == "int64" and any(isinstance(x, float) for x in inputs) else dtype
    )
    shape = broadcast(*(x.shape for x in tensors))
    like = next((x for x in tensors if x.shape == shape), None)
    return operator_result(shape, dtype, tensors, keeps, dense_like(like) if like else None)


def saved_factors(x: Any, y: Any) -> list[Any]:
    """Return which of two factors backward needs: each for the gradient of the other."""
    return [x if _needs(y) else None, y if _needs(x) else None]


def _needs(x: Any) -> bool:
    return isinstance(x, Tensor) and x.needs_gradient


def row_major(shape: Sequence[int]) -> Shape:
    """Return the strides of a tensor that lies in memory in the order of its axes."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def dense_like(x: Tensor) -> Shape:
    """Return the strides of a tensor without gaps whose axes lie in memory in the order of those of ``x``."""
    order = sorted(range(x.ndim), key=lambda axis: -x.strides[axis])
    strides = dict(zip(order, row_major([x.shape[axis] for axis in order])))
    return tuple(strides[axis] for axis in range(x.ndim))


def view_strides(x: Tensor, shape: Shape) -> Shape | None:
    """Return the strides of ``x`` viewed in another ``shape``; None if its elements must be copied for that."""
    runs: list[tuple[int, int]] = []  # (elements, stride) of neighbouring axes that lie in memory like one
    for size, stride in zip(x.shape, x.strides):
        if size > 1 and runs and runs[-1][1] == size * stride:
            runs[-1] = (runs[-1][0] * size, stride)
        elif size > 1:
            runs.append((size, stride))
    strides, left, step = [], 1, 1
    for size in reversed(shape):
        if left == 1 and size > 1:
            left, step = runs.pop()
        if left % size:
            return None
        strides.append(step)
        left, step = left // size, step * size
    return tuple(reversed(strides))


def broadcast(*shapes: Shape) -> Shape:
    """Return the shape of elementwise work on tensors of ``shapes``."""
    length = max(map(len, shapes))
    padded = [(1,) * (length - len(shape)) + tuple(shape) for shape in shapes]
    merged = tuple(next((size for size in sizes if size != 1), 1) for sizes in zip(*padded))
    for sizes in zip(*padded):
        if len({*sizes} - {1}) > 1:
            raise ValueError(f"shapes that cannot be broadcast together: {', '.join(map(str, shapes))}")
    return merged


def promote_dtypes(*dtypes: str) -> str:
    """Return the type of elementwise work on tensors of ``dtypes``."""
    return max(dtypes, key=_ORDER.index)


_thread = threading.local()


class Storage:
    """The memory of a tensor, which its views share."""

    __slots__ = ("is_weight", "num_bytes")

    def __init__(self, num_bytes: int, is_weight: bool = False) -> None:
        self.num_bytes, self.is_weight = num_bytes, is_weight


class ForwardCost:
    """A forward pass as it is recorded.

    autocast: matrix products cast their inputs to bfloat16 and norms compute in float32, as under CUDA's autocast.
    ranks: how many share the tokens of a sample.
    """

    def __init__(self, autocast: bool = False, ranks: int = 1) -> None:
        self.autocast, self.ranks = autocast, ranks
        self.with_gradient = True
        self.multiply_adds = 0
        """Of matrix products, convolutions and attention, without elementwise work, as published counts."""
        self.widest_bytes = 0
        """Of the largest tensor that gets a gradient."""
        self._saved: dict[Storage, Any] = {}
        self._inputs: dict[Storage, None] = {}
        self._block: Any = None

    def save(self, storage: Storage) -> None:
        """Record that backward needs this memory; weights are not counted."""
        if not storage.is_weight:
            self._saved.setdefault(storage, self._block)

    @contextmanager
    def block(self, block: Any, inputs: Iterable[Storage]) -> Iterator[None]:
        """Record what happens in ``block``, one of the parts that can be recomputed from their inputs."""
        self._inputs |= {storage: None for storage in inputs if not storage.is_weight}
        outer, self._block = self._block, block
        yield
        self._block = outer

    def saved_bytes(self, recompute: bool = False) -> int:
        """Return the bytes kept from forward to backward; with ``recompute``, blocks keep only their inputs."""
        if not recompute:
            return sum(storage.num_bytes for storage in self._saved)
        outside = {storage for storage, block in self._saved.items() if block is None}
        return sum(storage.num_bytes for storage in outside | self._inputs.keys())

    def largest_block_bytes(self) -> int:
        """Return the bytes kept in the block that keeps the most."""
        sums: dict[Any, int] = {}
        for storage, block in self._saved.items():
            if block is not None:
                sums[block] = sums.get(block, 0) + storage.num_bytes
        return max(sums.values(), default=0)


def current() -> ForwardCost:
    """Return the trace that is being recorded, or else a temporary one."""
    return getattr(_thread, "trace", None) or ForwardCost()


@contextmanager
def recording(trace: ForwardCost) -> Iterator[ForwardCost]:
    """Record into ``trace`` what this thread computes on the meta backend."""
    outer = getattr(_thread, "trace", None)
    _thread.trace = trace
    try:
        yield trace
    finally:
        _thread.trace = outer
