"""An overview of a data set: sizes, buckets and classes, and the first images of each class as they enter a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from einops import rearrange

from mindspeed_mm_dit.configs.data import DataConfig
from mindspeed_mm_dit.configs.source import Size, SourceParam, size_words
from mindspeed_mm_dit.data.buckets import fraction_after_crop
from mindspeed_mm_dit.data.check_images import Look, enlargements, look_at
from mindspeed_mm_dit.data.order import order_of
from mindspeed_mm_dit.data.shards import ShardRows
from mindspeed_mm_dit.data.sources import Rows, source_of

SOME = 1_000
"""Number of images in shards whose sizes are read."""
UNEVEN = 10
"""A class with this many times the images of another gets a warning."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the images of a data set, from their headers."""

    shorter: np.ndarray
    """(N,) int64: shorter side of each image in pixels, ascending."""
    num_grey: int
    """Images without colour."""
    part_cut: float
    """Median fraction of an image that a centre square crop removes."""

    @classmethod
    def of(cls, looks: Sequence[Look]) -> Sizes:
        """Collect the sizes of readable images."""
        shorter, longer = np.sort(np.array([(look.height, look.width) for look in looks]).reshape(-1, 2)).T
        return cls(np.sort(shorter), sum(look.is_grey for look in looks), float(np.median(1 - shorter / longer)))

    @property
    def median(self) -> int:
        """Median of the shorter side."""
        return int(self.shorter[len(self.shorter) // 2])

    def enlarged(self, image_size: int) -> int:
        """Return how many images are smaller than ``image_size``."""
        return int((self.shorter < image_size).sum())


def sizes_of(rows: Rows, size: int | Size) -> Sizes:
    """Return the image sizes from the headers; in shards only of SOME images, unless all of these are grey."""
    if isinstance(rows.paths, ShardRows) and len(rows) > SOME:
        some = _sizes_of_each(rows.subset(np.linspace(0, len(rows) - 1, SOME).astype(int)), size)
        if some.num_grey < len(some.shorter):
            return some
    return _sizes_of_each(rows, size)


def _sizes_of_each(rows: Rows, size: int | Size) -> Sizes:
    return Sizes.of([look for look in looks_at(rows, size) if look.problem is None])


def looks_at(rows: Rows, size: int | Size) -> list[Look]:
    """Look at the header of each image."""
    paths: Any = rows.paths
    if not isinstance(paths, ShardRows):
        return look_at([Path(path) for path in paths], size, decode=False)
    return look_at([partial(paths.content, number) for number in range(len(rows))], size, decode=False)


def bucket_table(train: Rows, valid: Rows, param: SourceParam) -> list[str]:
    """Return a table of the buckets: samples, samples left out of an epoch, cropped fraction, enlarged samples."""
    shapes, sizes = (
        np.concatenate(pair) for pair in zip(_shapes_and_sizes(train, param), _shapes_and_sizes(valid, param))
    )
    uncropped, times = fraction_after_crop(sizes, shapes), enlargements(sizes, shapes)
    held_out = np.arange(len(sizes)) >= len(train)
    group = 1 if train.shapes is None else param.bucket_group
    lines = [f"{'bucket':>16}  to train on  left out  held out  cut off: mean   most  enlarged, at most"]
    for shape in np.unique(shapes, axis=0):
        in_bucket = (shapes == shape).all(1)
        count, most = int((in_bucket & ~held_out).sum()), times[in_bucket].max()
        mean_cut, most_cut = 1 - uncropped[in_bucket].mean(), 1 - uncropped[in_bucket].min()
        samples = int(in_bucket[: len(train)][train.entries].sum())
        lines.append(
            f"{size_words([shape]):>16}  {count:>11,}  {samples % group:>8,}  "
            f"{int((in_bucket & held_out).sum()):>8,}  {mean_cut:>13.1%}  {most_cut:>5.1%}  "
            f"{int((times[in_bucket] > 1).sum()):>8,}" + (f", {most:.1f} times" if most > 1 else "")
        )
    rectangles, square = sizes[:, -2:], (sizes[:, -2:].min(1) / sizes[:, -2:].max(1)).mean()
    area, noun = fraction_after_crop(rectangles, shapes[:, -2:]).mean(), "image" if sizes.shape[1] == 2 else "frame"
    frames = f"; {shapes[:, 0].sum() / sizes[:, 0].sum():.1%} of the frames are" if noun == "frame" else ""
    return [*lines, f"{area:.1%} of each {noun}'s area is kept; a square would keep {square:.1%}{frames}"]


def _shapes_and_sizes(rows: Rows, param: SourceParam) -> tuple[np.ndarray, np.ndarray]:
    """Return the target shape and the original size of each sample."""
    assert rows.sizes is not None
    return np.broadcast_to(param.sample_size, rows.sizes.shape) if rows.shapes is None else rows.shapes, rows.sizes


def note_of_enlarged(rows: Rows, param: SourceParam) -> str | None:
    """Return a warning about samples smaller than their bucket, or None."""
    shapes, sizes = _shapes_and_sizes(rows, param)
    times = enlargements(sizes, shapes)
    if times.max() <= 1:
        return None
    largest = rows.paths[int(times.argmax())]
    return (
        f"warning: {int((times > 1).sum()):,} of {len(rows):,} {param.noun}s are enlarged to their bucket, {largest} "
        f"{times.max():.1f} times: a smaller budget or smaller shapes would avoid this"
    )


def counts_of(rows: Rows) -> np.ndarray:
    """Return the number of images of each class, (classes,) int64."""
    return np.bincount(rows.labels, minlength=len(rows.classes))


def note_of_uneven(rows: Rows, noun: str = "image") -> str | None:
    """Return a warning about classes with very different numbers of images, or None."""
    counts = counts_of(rows)
    few, many = int(np.where(counts > 0, counts, counts.max()).argmin()), int(counts.argmax())
    if counts[many] < UNEVEN * counts[few]:
        return None
    return (
        f"warning: {rows.classes[many]} has {counts[many]:,} {noun}s and {rows.classes[few]} {counts[few]:,}: a class "
        f"is drawn as often as it has {noun}s"
    )


def first_samples(
    data: DataConfig, train: Rows, channels: int, seed: int, per_class: int, num_classes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the first images that a run with ``seed`` trains on, after augmentation.

    They are scaled, cropped and mirrored as in the first epoch. Returns pixels (n, H, W, channels) uint8 and their
    sample indices (n,) int64. With labels: at most ``per_class`` of each of the first ``num_classes`` non-empty
    classes, ordered by label. Without: 2 * ``per_class``.
    """
    param = data.dataset_param
    order = order_of(train, param, seed, data.dataloader_param.shuffle)
    sample_indices = np.arange(len(order), dtype=np.int64)
    images = order.images(sample_indices)
    chosen = sample_indices[: 2 * per_class]
    if "label" in train.items:
        labels = train.labels[images]
        classes = np.unique(labels)[:num_classes]
        chosen = np.concatenate([sample_indices[labels == label][:per_class] for label in classes])
    reader = source_of(param).visuals(train, param, channels)
    augmentations = reader.views_at(seed, chosen)
    samples = [reader.read(images[chosen[[n]]], augmentations[[n]]) for n in range(len(chosen))]
    pixels = [framed(read.arrays["pixels"][0], *param.frame) for read in samples]
    return rearrange(pixels, "n c h w -> n h w c"), np.array([int(read.rows[0]) for read in samples])


def framed(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Center pixels (C, h, w) on a grey canvas (C, height, width) that is large enough for all shapes."""
    top, left = (height - pixels.shape[1]) // 2, (width - pixels.shape[2]) // 2
    around = ((0, 0), (top, height - pixels.shape[1] - top), (left, width - pixels.shape[2] - left))
    return np.pad(pixels, around, constant_values=128)
