"""Buckets: choose a shape for each sample, by the sizes of the samples alone; ``BucketOrder`` is in ``order.py``."""

from __future__ import annotations

import numpy as np

from mindspeed_mm_dit.configs.source import Shape, SourceParam, format_sizes
from mindspeed_mm_dit.data.sources import Rows
from mindspeed_mm_dit.errors import DataError


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
            f"dataset_param.buckets lists {len(shapes)} shapes, more than the {len(sizes)} samples. List fewer."
        )
    if not param.has_listed_shapes:
        return shapes[_without_small_buckets(sizes, shapes, param.bucket_group)]
    chosen = nearest(sizes, shapes)
    counts = np.bincount(chosen, minlength=len(shapes))
    if not counts.all():
        empty = shapes[int(counts.argmin())].tolist()
        raise DataError(f"dataset_param.buckets lists {empty}, but no sample is nearest to this shape. Drop it.")
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
    for shape, count in () if rows.shapes is None else count_shapes(rows.shapes[rows.entries]):
        if count < group:
            raise DataError(
                f"dataset_param.buckets: {format_sizes([shape])} has {count} samples to train on, not counting those "
                f"held out (valid_fraction), but a group takes dataset_param.bucket_group = {group}. Set bucket_group "
                f"to at most {count}; or drop the shape, if you list shapes, and its samples go to another one."
            )


def count_shapes(shapes: np.ndarray) -> list[tuple[Shape, int]]:
    """Return each distinct shape of ``shapes`` (N, 2 or 3), ascending, with its number of samples."""
    distinct, counts = np.unique(shapes, axis=0, return_counts=True)
    return list(zip(map(tuple, distinct.tolist()), counts.tolist()))


def bucket_report(shapes: np.ndarray, group: int) -> list[str]:
    """Return the line a run prints about its buckets: samples of each, and how many each epoch leaves out."""
    shape_counts = count_shapes(shapes)
    rest = sum(count % group for _, count in shape_counts)
    words = ", ".join(f"{format_sizes([shape])}: {count:,}" for shape, count in shape_counts)
    left_out = f"; each epoch drops {rest:,}, different ones each time" if rest else ""
    return [f"buckets   {words}, {group} in a row{left_out}"]
