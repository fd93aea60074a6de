"""Work on many small files in threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

In = TypeVar("In")
Out = TypeVar("Out")
AT_ONCE = 32
"""A thread takes so many files at a time: to hand over one costs as much as to look at a small one."""


def in_threads(work: Callable[[In], Out], items: Sequence[In]) -> Iterator[Out]:
    """Yield ``work`` of each item, in their order."""
    parts = [items[start : start + AT_ONCE] for start in range(0, len(items), AT_ONCE)]
    with ThreadPoolExecutor() as pool:
        for done in pool.map(lambda part: [work(item) for item in part], parts):
            yield from done
