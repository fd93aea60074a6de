"""Buckets: choose a shape for each sample, and order the samples so that those of one shape come together.

Both are pure functions. The shape depends on the sizes of the samples, known before any is read; the order depends on
the seed and the sample index.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from mindspeed_mm_dit.configs.source import Shape, SourceParam, size_words
from mindspeed_mm_dit.data.order import VALIDATION_START, Order, Stream, generator
from mindspeed_mm_dit.data.rows import Rows
from mindspeed_mm_dit.errors import ConfigError, DataError


def fraction_after_crop(sizes: np.ndarray, shapes: np.ndarray) -> np.ndarray:
    """Return the fraction of each sample of ``sizes`` (..., 2 or 3) left after a cut to ``shapes`` (..., 2 or 3)."""
    ratio = (sizes[..., -2] * shapes[..., -1]) / (sizes[..., -1] * shapes[..., -2])  # of the two aspect ratios
    return np.minimum(ratio, 1 / ratio) * (shapes[..., :-2] / sizes[..., :-2]).prod(-1)


def fits(sizes: np.ndarray, shapes: np.ndarray) -> np.ndarray:
    """Return which of ``shapes`` (K, 2 or 3) each sample of ``sizes`` (..., 2 or 3) is long enough for, (..., K) bool.

    A video does not fit a shape of one frame if any shape has several: it would silently be trained on as an image.
    """
    frames, target_frames = sizes[..., None, :-2], shapes[:, :-2]
    still = (target_frames > 1).any() & (target_frames == 1) & (frames > 1)
    return ((target_frames <= frames) & ~still).all(-1)


def nearest(sizes: np.ndarray, shapes: np.ndarray) -> np.ndarray:
    """Return which of ``shapes`` (K, 2 or 3) keeps most of each sample of ``sizes`` (N, 2 or 3), (N,) int64.

    Among shapes that keep the same fraction, take the largest that does not enlarge the sample, else the smallest.
    Shapes that the sample is too short for come last.
    """
    part, volume = fraction_after_crop(sizes[:, None], shapes).round(9), shapes.prod(1)
    part = np.where(fits(sizes, shapes), part, 0)
    enlarges = (shapes > sizes[:, None]).any(-1)
    return np.lexsort((np.where(enlarges, volume, -volume), enlarges, -part), axis=-1)[:, 0]


def shapes_of(sizes: np.ndarray, param: SourceParam) -> np.ndarray:
    """Return the shape from ``param.sizes`` for each sample of ``sizes``, both (N, 2 or 3) int64.

    If the shapes come from a budget, those with fewer samples than a group are dropped, the emptiest first, as long as
    their samples fit other shapes.
    Raises DataError if no sample is nearest to a listed shape.
    """
    shapes = np.array(param.sizes, np.int64)
    if len(shapes) > len(sizes) and param.has_listed_shapes:
        raise DataError(
            f"dataset_param.buckets: {len(shapes)} shapes", f"are more than the {len(sizes)} samples", "name fewer"
        )
    if not param.has_listed_shapes:
        return shapes[_without_small_buckets(sizes, shapes, param.bucket_group)]
    chosen = nearest(sizes, shapes)
    counts = np.bincount(chosen, minlength=len(shapes))
    if not counts.all():
        empty = shapes[int(counts.argmin())].tolist()
        raise DataError(
            f"dataset_param.buckets: {empty}", "no sample is nearest to this shape", "drop it from the list"
        )
    return shapes[chosen]


def _without_small_buckets(sizes: np.ndarray, shapes: np.ndarray, group: int) -> np.ndarray:
    """Return the index of each sample's shape, (N,) int64, without the shapes that have fewer samples than a group.

    The emptiest shape is dropped first, and its samples move to their next best shape, which they may fill. A shape
    stays if some samples fit no other.
    """
    chosen, fit = nearest(sizes, shapes), np.unique(fits(sizes, shapes), axis=0)
    remaining = np.ones(len(shapes), bool)
    while True:
        counts = np.bincount(chosen, minlength=len(shapes))
        needed = fit[(fit & remaining).sum(1) == 1].any(0)
        few = np.flatnonzero(remaining & ~needed & (counts < group))
        if not len(few) or remaining.sum() == 1:
            return chosen
        remaining[few[counts[few].argmin()]] = False
        moved = ~remaining[chosen]
        chosen[moved] = np.flatnonzero(remaining)[nearest(sizes[moved], shapes[remaining])]


def check_filled(rows: Rows, group: int) -> None:
    """Raise DataError for a bucket in which an epoch of ``rows`` has fewer samples than a group."""
    for shape, count in () if rows.shapes is None else counted(rows.shapes[rows.entries]):
        if count < group:
            raise DataError(
                f"dataset_param.buckets: {size_words([shape])}",
                f"has {count} samples to train on, fewer than dataset_param.bucket_group = {group}, so none would be "
                "trained on",
                f"set bucket_group to at most {count}, or drop the shape if shapes are listed: its samples go to "
                "another. Samples held out (valid_fraction) do not count",
            )


def counted(shapes: np.ndarray) -> list[tuple[Shape, int]]:
    """Return each distinct shape of ``shapes`` (N, 2 or 3), ascending, with its number of samples."""
    distinct, counts = np.unique(shapes, axis=0, return_counts=True)
    return list(zip(map(tuple, distinct.tolist()), counts.tolist()))


def lines(shapes: np.ndarray, group: int) -> list[str]:
    """Return the line a run prints about its buckets: samples of each, and how many each epoch leaves out."""
    shape_counts = counted(shapes)
    rest = sum(count % group for _, count in shape_counts)
    words = ", ".join(f"{size_words([shape])}: {count:,}" for shape, count in shape_counts)
    left_out = f"; each epoch drops {rest:,}, different ones each time" if rest else ""
    return [f"buckets   {words}, {group} in a row{left_out}"]


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

    def micro_batches(self, start: int, size: int, rank: int, ranks: int, rounds: int) -> Iterator[np.ndarray]:
        """Yield the micro-batches of one rank, each from one bucket.

        The micro-batches of a step are dealt to the ranks by cost, the most expensive first, and in reverse order every
        second round. Ranks then wait little for each other, whether they synchronize after each round or after the
        step.
        """
        while True:
            step = np.arange(start, start + rounds * ranks * size).reshape(-1, size)
            dealt = np.argsort(-self._costs[self.images(step[:, 0])], kind="stable").reshape(rounds, ranks)
            dealt[1::2] = dealt[1::2, ::-1]
            yield from step[dealt[:, rank]]
            start += step.size

    def check(self, micro_batch_size: int, start: int = 0) -> None:
        if self.group % micro_batch_size:
            raise ConfigError(
                f"--micro-batch-size = {micro_batch_size}",
                f"does not divide dataset_param.bucket_group: {self.group} % {micro_batch_size} = "
                f"{self.group % micro_batch_size}",
                f"set bucket_group to {-(-self.group // micro_batch_size) * micro_batch_size}, or use a divisor of it: "
                "a micro-batch has samples of one shape",
            )
        if start % micro_batch_size:
            raise ConfigError(
                f"--micro-batch-size = {micro_batch_size}",
                f"does not divide the {start} samples that the run has consumed, so micro-batches would have samples "
                "of two shapes",
                "resume with the micro-batch and global batch that the run had",
            )
