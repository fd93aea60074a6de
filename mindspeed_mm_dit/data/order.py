"""The order of samples: the validation split, the row at each sample index, and the sample indices of each rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from mindspeed_mm_dit.configs.source import SourceParam
from mindspeed_mm_dit.data.draws import Stream, generator
from mindspeed_mm_dit.data.rows import Rows


def split(
    count: int, valid_fraction: float, seed: int, labels: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Split ``count`` samples into those to train on and those held out, each ascending; it depends only on the seed.

    labels: (count,); if given, the same fraction of each class is held out.
    """
    shuffled = generator(seed, Stream.VALID_SPLIT, 0).permutation(count)
    if labels is not None:
        shuffled = shuffled[np.argsort(_positions_in_class(labels[shuffled]), kind="stable")]
    held_out = round(count * valid_fraction)
    return np.sort(shuffled[held_out:]), np.sort(shuffled[:held_out])


def _positions_in_class(labels: np.ndarray) -> np.ndarray:
    """Return each sample's relative position in its class, in (0, 1); the first tenth of all has a tenth of each."""
    positions = np.empty(len(labels))
    for label in np.unique(labels):
        of_class = labels == label
        positions[of_class] = (np.arange(of_class.sum()) + 0.5) / of_class.sum()
    return positions


def split_rows(rows: Rows, param: SourceParam, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return which rows a run with ``param`` and ``seed`` trains on, and which it holds out."""
    return split(len(rows), param.valid_fraction, seed, rows.labels if param.valid_by_class else None)


class Order(ABC):
    """The order of samples: maps a sample index to a row of the data set."""

    @abstractmethod
    def __len__(self) -> int:
        """Return how many samples an epoch has."""

    @abstractmethod
    def images(self, sample_indices: np.ndarray) -> np.ndarray:
        """Return the row at each sample index, (B,) int64."""

    def check(  # noqa: B027 (one without buckets has nothing to check)
        self, micro_batch_size: int, start: int = 0
    ) -> None:
        """Raise ConfigError unless micro-batches can be made from sample index ``start`` on."""

    def micro_batches(self, start: int, size: int, rank: int, ranks: int, rounds: int) -> Iterator[np.ndarray]:
        """Yield the sample indices of one rank's micro-batches from ``start`` on, each (size,) int64.

        rounds: micro-batches per rank and step. A step has the same samples for any rank count and size.
        """
        return micro_batches(start, size, rank, ranks, rounds)


class SampleOrder(Order):
    """Endless order of ``num_images`` images, reshuffled each epoch from the seed.

    Sample index i belongs to epoch i // num_images; each epoch has every image exactly once, whatever the
    batch size.
    """

    def __init__(self, num_images: int, seed: int, shuffle: bool = True) -> None:
        self.num_images, self.seed, self.shuffle = num_images, seed, shuffle
        self._epoch = lru_cache(maxsize=2)(self._permutation)

    def __len__(self) -> int:
        return self.num_images

    def _permutation(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.num_images)
        return generator(self.seed, Stream.ORDER, epoch).permutation(self.num_images)

    def images(self, sample_indices: np.ndarray) -> np.ndarray:
        epochs, offsets = np.divmod(sample_indices, self.num_images)
        return np.array([self._epoch(e)[o] for e, o in zip(epochs.tolist(), offsets.tolist())], np.int64)


class RepeatedOrder(Order):
    """An order of entries, several of which may be one row."""

    def __init__(self, order: Order, entries: np.ndarray) -> None:
        """``order``: of the entries; ``entries`` (E,): the row of each."""
        self._order, self._entries = order, entries

    def __len__(self) -> int:
        return len(self._order)

    def images(self, sample_indices: np.ndarray) -> np.ndarray:
        return self._entries[self._order.images(sample_indices)]

    def check(self, micro_batch_size: int, start: int = 0) -> None:
        self._order.check(micro_batch_size, start)

    def micro_batches(self, start: int, size: int, rank: int, ranks: int, rounds: int) -> Iterator[np.ndarray]:
        return self._order.micro_batches(start, size, rank, ranks, rounds)


def micro_batches(
    start: int, micro_batch_size: int, rank: int, world_size: int, rounds: int | None = None
) -> Iterator[np.ndarray]:
    """Yield the sample indices of one rank's micro-batches from ``start`` on, each (micro_batch_size,) int64.

    In every round the ranks take consecutive slices, so a global batch has the same samples for any rank
    count and micro-batch size, however many ``rounds`` a step has.
    """
    indices = np.arange(micro_batch_size, dtype=np.int64) + start + rank * micro_batch_size
    while True:
        yield indices
        indices = indices + micro_batch_size * world_size
