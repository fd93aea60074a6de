"""What a forward pass costs: multiply-adds, and the memory that autograd keeps for backward."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

_thread = threading.local()


class Storage:
    """The memory of a tensor, which its views share."""

    __slots__ = ("is_weight", "num_bytes")

    def __init__(self, num_bytes: int, is_weight: bool = False) -> None:
        self.num_bytes, self.is_weight = num_bytes, is_weight


class Trace:
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


def current() -> Trace:
    """Return the trace that is being recorded, or else a temporary one."""
    return getattr(_thread, "trace", None) or Trace()


@contextmanager
def recording(trace: Trace) -> Iterator[Trace]:
    """Record into ``trace`` what this thread computes on the meta backend."""
    outer = getattr(_thread, "trace", None)
    _thread.trace = trace
    try:
        yield trace
    finally:
        _thread.trace = outer
