"""The order of samples, and every random draw of a sample, as pure functions of (seed, sample index).

The validation split, the row at each sample index, the sample indices of each rank, and the draws. They depend on
neither framework, process count nor batch size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from enum import IntEnum
from functools import lru_cache

import numpy as np

from mindspeed_mm_dit.configs.source import SourceParam
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


class Stream(IntEnum):
    """The kinds of draw. The numbers are part of the meaning of a seed: never reuse one."""

    ORDER = 1
    TIMESTEP = 2
    NOISE = 3
    LABEL_DROP = 4
    FLIP = 5
    POSTERIOR = 6
    VALID_SPLIT = 7
    SAMPLE_START = 8
    SAMPLE_NOISE = 9
    CAPTION = 10
    CLIP_START = 11
    SAMPLE_LABEL = 12
    SOURCE = 13
    ENCODER_DROP = 14


VALIDATION_START = 1 << 62
"""Sample indices of validation start here, so validation never shares a draw with training."""


def generator(seed: int, stream: Stream, sample_index: int, block: int = 0) -> np.random.Generator:
    """Return the generator of one stream at one sample index; ``block`` separates several draws there."""
    return philox((seed, stream), (0, block, sample_index, 0))


def philox(key: tuple[int, int], counter: tuple[int, int, int, int] = (0, 0, 0, 0)) -> np.random.Generator:
    """Return NumPy's Philox4x64-10 (Salmon et al. 2011) for whole numbers in [0, 2**64)."""
    # Without the dtype NumPy takes numbers from 2**63 on for floats.
    return np.random.Generator(np.random.Philox(key=np.array(key, np.uint64), counter=np.array(counter, np.uint64)))


def timesteps(seed: int, sample_indices: np.ndarray, num_train_timesteps: int) -> np.ndarray:
    """Return timesteps, uniform in 0 ... T-1, (B,) int64."""
    return np.array(
        [generator(seed, Stream.TIMESTEP, p).integers(num_train_timesteps) for p in sample_indices.tolist()], np.int64
    )


def evenly_spread(numbers: np.ndarray) -> np.ndarray:
    """Return the points ``numbers`` (B,) of the van der Corput sequence, which fills [0, 1) evenly, (B,) float64.

    Any 2**k consecutive points that begin at a multiple of 2**k put one point into each 2**k-th part of [0, 1) (van der
    Corput 1935: the binary digits of the number, mirrored at the point).
    """
    points, digit_value = np.zeros(len(numbers)), 0.5
    while numbers.any():
        points += digit_value * (numbers & 1)
        numbers, digit_value = numbers >> 1, digit_value / 2
    return points


def normals(
    seed: int, stream: Stream, sample_indices: np.ndarray, shape: tuple[int, ...], block: int = 0
) -> np.ndarray:
    """Return standard normal noise, (B, *shape) float32."""
    out = np.empty((len(sample_indices), *shape), np.float32)
    for row, sample_index in zip(out, sample_indices.tolist()):
        generator(seed, stream, sample_index, block).standard_normal(dtype=np.float32, out=row)
    return out


def uniforms(seed: int, stream: Stream, sample_indices: np.ndarray, block: int = 0) -> np.ndarray:
    """Return numbers uniform in [0, 1), (B,) float64."""
    return np.array([generator(seed, stream, p, block).random() for p in sample_indices.tolist()])


def coins(seed: int, stream: Stream, sample_indices: np.ndarray, probability: float, block: int = 0) -> np.ndarray:
    """Return draws that are True with ``probability``, (B,) bool."""
    if probability == 0:
        return np.zeros(len(sample_indices), bool)
    return uniforms(seed, stream, sample_indices, block) < probability
