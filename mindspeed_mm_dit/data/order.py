"""Which samples are held out, which stands at a position of a run, and which positions a rank's micro-batch covers."""

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
    """Return which of ``count`` samples are trained on and which held out, each ascending; the seed alone decides.

    labels: (count,), where each class is to have its share of those held out.
    """
    shuffled = generator(seed, Stream.VALID_SPLIT, 0).permutation(count)
    if labels is not None:
        shuffled = shuffled[np.argsort(_places_in_class(labels[shuffled]), kind="stable")]
    held_out = round(count * valid_fraction)
    return np.sort(shuffled[held_out:]), np.sort(shuffled[:held_out])


def _places_in_class(labels: np.ndarray) -> np.ndarray:
    """Return how far along its class each sample stands, in (0, 1): the first tenth of all is a tenth of each class."""
    places = np.empty(len(labels))
    for label in np.unique(labels):
        own = labels == label
        places[own] = (np.arange(own.sum()) + 0.5) / own.sum()
    return places


def split_rows(rows: Rows, param: SourceParam, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return which rows a run with ``param`` and ``seed`` trains on, and which it holds out."""
    return split(len(rows), param.valid_fraction, seed, rows.labels if param.valid_by_class else None)


class Order(ABC):
    """Which sample stands at each position of a run."""

    @abstractmethod
    def __len__(self) -> int:
        """Return how many positions an epoch has."""

    @abstractmethod
    def images(self, sample_indices: np.ndarray) -> np.ndarray:
        """Return the sample at each position, (B,) int64."""

    def check(  # noqa: B027 (one without buckets has nothing to check)
        self, micro_batch_size: int, start: int = 0
    ) -> None:
        """Raise ConfigError unless micro-batches from position ``start`` on can be made."""

    def micro_batches(self, start: int, size: int, rank: int, ranks: int, rounds: int) -> Iterator[np.ndarray]:
        """Yield the positions of one rank's micro-batches from position ``start`` on, each (size,) int64.

        rounds: how many of them a step has; any rank count and size cut a step into the same samples.
        """
        return micro_batches(start, size, rank, ranks, rounds)


class SampleOrder(Order):
    """Endless order of ``num_images`` images, reshuffled each epoch from the seed.

    Position p belongs to epoch p // num_images; each epoch holds every image exactly once, whatever the
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


def micro_batches(
    start: int, micro_batch_size: int, rank: int, world_size: int, rounds: int | None = None
) -> Iterator[np.ndarray]:
    """Yield the positions of one rank's micro-batches from position ``start`` on, each (micro_batch_size,) int64.

    In every round the ranks take consecutive slices, so any rank count and micro-batch size cut a
    global batch into the same samples, however many ``rounds`` a step has.
    """
    own = np.arange(micro_batch_size, dtype=np.int64) + start + rank * micro_batch_size
    while True:
        yield own
        own = own + micro_batch_size * world_size
