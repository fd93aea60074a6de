"""The order of samples, and every random draw of a sample, as pure functions of (seed, sample index).

Sample index i is the i-th sample the run consumes, over all ranks. Each kind of draw has its own stream of NumPy's
counter-based Philox generator: the key is (seed, stream), the counter starts at the sample index. So draws and order do
not depend on the number of ranks, the micro-batch size, a resume or the framework, and a new kind of draw changes no
other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from enum import IntEnum
from functools import lru_cache

import numpy as np

from mindspeed_mm_dit.configs.data import MixedParam
from mindspeed_mm_dit.configs.source import SourceParam
from mindspeed_mm_dit.data.mixed import rows_by_source
from mindspeed_mm_dit.data.sources import Rows
from mindspeed_mm_dit.errors import ConfigError


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


def van_der_corput(numbers: np.ndarray) -> np.ndarray:
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


def bernoulli(seed: int, stream: Stream, sample_indices: np.ndarray, probability: float, block: int = 0) -> np.ndarray:
    """Return draws that are True with ``probability``, (B,) bool."""
    if probability == 0:
        return np.zeros(len(sample_indices), bool)
    return uniforms(seed, stream, sample_indices, block) < probability


# --- the order --------------------------------------------------------------------------------------------------------


def split(
    count: int, valid_fraction: float, seed: int, labels: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Split ``count`` samples into those to train on and those held out, each ascending; it depends only on the seed.

    labels: (count,); if given, the same fraction of each class is held out.
    """
    shuffled = generator(seed, Stream.VALID_SPLIT, 0).permutation(count)
    if labels is not None:
        # By relative position in the class, in (0, 1): the first tenth of all then has a tenth of each class.
        positions, shuffled_labels = np.empty(count), labels[shuffled]
        for label in np.unique(labels):
            of_class = shuffled_labels == label
            positions[of_class] = (np.arange(of_class.sum()) + 0.5) / of_class.sum()
        shuffled = shuffled[np.argsort(positions, kind="stable")]
    held_out = round(count * valid_fraction)
    return np.sort(shuffled[held_out:]), np.sort(shuffled[:held_out])


def split_rows(rows: Rows, param: SourceParam, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return which rows a run with ``param`` and ``seed`` trains on, and which it holds out."""
    return split(len(rows), param.valid_fraction, seed, rows.labels if param.valid_by_class else None)


def micro_batches(start: int, micro_batch_size: int, rank: int, world_size: int) -> Iterator[np.ndarray]:
    """Yield the sample indices of one rank's micro-batches from ``start`` on, each (micro_batch_size,) int64.

    Ranks take consecutive slices in turn, so a global batch has the same samples for any rank count and micro-batch
    size, however many micro-batches a step has.
    """
    indices = np.arange(micro_batch_size, dtype=np.int64) + start + rank * micro_batch_size
    while True:
        yield indices
        indices = indices + micro_batch_size * world_size


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

    def micro_batches(
        self, start: int, size: int, rank: int, ranks: int, num_microbatches: int
    ) -> Iterator[np.ndarray]:
        """Yield the sample indices of one rank's micro-batches from ``start`` on, each (size,) int64.

        num_microbatches: micro-batches per rank and step. A step has the same samples for any rank count and size.
        """
        return micro_batches(start, size, rank, ranks)


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

    def micro_batches(
        self, start: int, size: int, rank: int, ranks: int, num_microbatches: int
    ) -> Iterator[np.ndarray]:
        return self._order.micro_batches(start, size, rank, ranks, num_microbatches)


class BucketOrder(Order):
    """Endless order of samples in groups, each from one bucket; reshuffled each epoch from the seed.

    An epoch has ``len(self)`` sample indices and repeats no sample. The samples of a bucket that do not fill a whole
    group are left out; with shuffling, these differ from epoch to epoch.

    buckets: (N,) bucket of each sample, counted from 0. fill: leave nothing out, and complete the last group of a
    bucket with samples from its start. costs: (N,) cost of a step with each sample, in any unit that grows with it.
    """

    def __init__(
        self,
        buckets: np.ndarray,
        group: int,
        seed: int,
        shuffle: bool = True,
        fill: bool = False,
        costs: np.ndarray | None = None,
    ) -> None:
        self.group, self._seed, self._shuffle, self._fill = group, seed, shuffle, fill
        self._buckets, self._counts = buckets, np.bincount(buckets)
        self._costs = np.zeros(len(buckets)) if costs is None else costs
        self._epoch = lru_cache(maxsize=2)(self._groups)

    def __len__(self) -> int:
        return int(sum(map(self._length, self._counts.tolist())))

    def _length(self, count: int) -> int:
        """Return how many sample indices a bucket of ``count`` samples takes in an epoch."""
        return (-(-count // self.group) if self._fill else count // self.group) * self.group

    def _groups(self, epoch: int) -> np.ndarray:
        """Return the samples of an epoch, in order."""
        samples = np.arange(len(self._buckets))
        if self._shuffle:
            samples = generator(self._seed, Stream.ORDER, epoch).permutation(samples)
        by_bucket = [samples[self._buckets[samples] == bucket] for bucket in range(len(self._counts))]
        groups = np.concatenate(
            [np.resize(members, self._length(len(members))).reshape(-1, self.group) for members in by_bucket]
        )
        if self._shuffle:
            groups = generator(self._seed, Stream.ORDER, epoch, block=1).permutation(groups)
        return groups.reshape(-1)

    def images(self, sample_indices: np.ndarray) -> np.ndarray:
        """Return the row at each sample index, (B,) int64; validation starts at the first group."""
        epochs, offsets = np.divmod(sample_indices % VALIDATION_START, len(self))
        return np.array([self._epoch(e)[o] for e, o in zip(epochs.tolist(), offsets.tolist())], np.int64)

    def micro_batches(
        self, start: int, size: int, rank: int, ranks: int, num_microbatches: int
    ) -> Iterator[np.ndarray]:
        """Yield the micro-batches of one rank, each from one bucket.

        The micro-batches of a step are dealt to the ranks by cost, the most expensive first, and in reverse order every
        second round. Ranks then wait little for each other, whether they synchronize after each round or after the
        step.
        """
        while True:
            step = np.arange(start, start + num_microbatches * ranks * size).reshape(-1, size)
            dealt = np.argsort(-self._costs[self.images(step[:, 0])], kind="stable").reshape(num_microbatches, ranks)
            dealt[1::2] = dealt[1::2, ::-1]
            yield from step[dealt[:, rank]]
            start += step.size

    def check(self, micro_batch_size: int, start: int = 0) -> None:
        if self.group % micro_batch_size:
            raise ConfigError(
                f"--micro-batch-size = {micro_batch_size} does not divide dataset_param.bucket_group = {self.group}, "
                "but a micro-batch has samples of one shape. Set bucket_group to "
                f"{-(-self.group // micro_batch_size) * micro_batch_size}, or use a micro-batch that divides it."
            )
        if start % micro_batch_size:
            raise ConfigError(
                f"--micro-batch-size = {micro_batch_size} does not divide the {start} samples that the run has "
                "consumed, so micro-batches would have samples of two shapes. Resume with the micro-batch and global "
                "batch that the run had."
            )


class MixedOrder(BucketOrder):
    """Endless order of groups, each from one source and bucket; each period gives every source ``weight`` groups.

    A period has as many groups as the weights add up to. Every source has its own order and epochs, and an epoch
    repeats no sample: a source with a large weight and few samples begins its next epoch sooner. members: the samples
    of each source; orders: the order of each.
    """

    def __init__(
        self,
        members: Sequence[np.ndarray],
        orders: Sequence[Order],
        group: int,
        weights: Sequence[int],
        seed: int,
        shuffle: bool,
        costs: np.ndarray,
    ) -> None:
        self.group, self._costs = group, costs
        self._members, self._orders, self._weights = members, orders, np.array(weights)

        def plan(period: int) -> np.ndarray:
            sources = np.repeat(np.arange(len(weights)), weights)
            return generator(seed, Stream.SOURCE, period).permutation(sources) if shuffle else sources

        self._plan: Callable[[int], np.ndarray] = lru_cache(maxsize=8)(plan)

    def __len__(self) -> int:
        return sum(map(len, self._orders))

    def images(self, sample_indices: np.ndarray) -> np.ndarray:
        """Return the row at each sample index, (B,) int64."""
        return np.array([self._at(*divmod(index, self.group)) for index in sample_indices.tolist()], np.int64)

    def _at(self, group: int, offset: int) -> int:
        period, position = divmod(group, int(self._weights.sum()))
        plan = self._plan(period)
        source = plan[position]
        before = period * int(self._weights[source]) + int((plan[:position] == source).sum())
        rows = self._orders[source].images(np.array([before * self.group + offset]))
        return int(self._members[source][rows[0]])


def order_of(rows: Rows, param: SourceParam, seed: int, shuffle: bool, held_out: bool = False) -> Order:
    """Return the order of ``rows``; ``held_out``: for validation, which leaves no row out."""
    if rows.repeats is not None and not held_out:
        once = replace(rows.subset(rows.entries), repeats=None)
        return RepeatedOrder(order_of(once, param, seed, shuffle), rows.entries)
    if rows.shapes is None:
        return SampleOrder(len(rows), seed, shuffle)
    costs = rows.shapes.prod(1)
    if isinstance(param, MixedParam) and not held_out:
        orders = [order_of(part, source, seed, shuffle) for part, source in zip(rows_by_source(rows), param.sources)]
        return MixedOrder(rows.facts.members(), orders, param.bucket_group, param.weights, seed, shuffle, costs)
    buckets = np.unique(rows.shapes, axis=0, return_inverse=True)[1].reshape(-1)
    return BucketOrder(buckets, param.bucket_group, seed, shuffle, held_out, costs)
