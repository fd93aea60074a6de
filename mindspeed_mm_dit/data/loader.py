"""Prepares batches ahead of the training step, in threads.

Threads suffice: decoding, resizing and drawing noise release Python's global interpreter lock, and nothing has
to be copied between processes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np

from mindspeed_mm_dit.data.samples import Batch


class BatchSource(Protocol):
    """Makes a batch from sample indices; called from several threads."""

    def batch(self, sample_indices: np.ndarray) -> Batch:
        """Return the arrays of ``sample_indices`` (B,) int64."""


def load_batches(
    samples: BatchSource, sample_indices: Iterable[np.ndarray], num_workers: int, prefetch_batches: int
) -> Generator[Batch, None, None]:
    """Yield ``samples.batch(indices)`` for each array ``indices`` of ``sample_indices``, in order.

    ``num_workers`` threads keep up to ``prefetch_batches`` batches ready; with 0 workers each batch is made
    on request. An error in a worker is raised here, at its batch.
    """
    if num_workers == 0:
        yield from map(samples.batch, sample_indices)
        return
    pool = ThreadPoolExecutor(num_workers, thread_name_prefix="batch")
    ready: deque[Future[Batch]] = deque()
    try:
        for indices in sample_indices:
            ready.append(pool.submit(samples.batch, indices))
            if len(ready) > prefetch_batches:
                yield ready.popleft().result()
        while ready:
            yield ready.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
