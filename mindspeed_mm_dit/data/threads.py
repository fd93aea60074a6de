"""Processes many small files in threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

In = TypeVar("In")
Out = TypeVar("Out")
AT_ONCE = 32
"""Files per task of a thread: handing over one file costs as much as looking at a small one."""


def in_threads(work: Callable[[In], Out], items: Sequence[In]) -> Iterator[Out]:
    """Yield ``work(item)`` for each item, in order."""
    parts = [items[start : start + AT_ONCE] for start in range(0, len(items), AT_ONCE)]
    with ThreadPoolExecutor() as pool:
        for done in pool.map(lambda part: [work(item) for item in part], parts):
            yield from done
