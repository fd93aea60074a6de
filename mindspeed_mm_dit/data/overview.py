"""What a data set looks like to a run: sizes of the pictures, and the first of each class as they enter a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from einops import rearrange

from mindspeed_mm_dit.configs.data import DataConfig
from mindspeed_mm_dit.data.check import Look, look_at
from mindspeed_mm_dit.data.order import SampleOrder
from mindspeed_mm_dit.data.rows import Rows
from mindspeed_mm_dit.data.shards import ShardRows
from mindspeed_mm_dit.data.sources import source_of

SOME = 1_000
"""Pictures in shards whose sizes are looked at."""
UNEVEN = 10
"""A class of so many times the images of another is worth a word."""


@dataclass(frozen=True)
class Sizes:
    """Pixels of the pictures of a data set, by their headers."""

    shorter: np.ndarray
    """(N,) int64: the shorter side of each, ascending."""
    num_grey: int
    """Pictures without colours."""
    part_cut: float
    """Part of its area that the middle one of them loses where the centre square is cut out."""

    @classmethod
    def of(cls, looks: Sequence[Look]) -> Sizes:
        """Collect them from looks at good pictures."""
        shorter, longer = (
            np.array([getattr(look, f"{side}_side") for look in looks]) for side in ("shorter", "longer")
        )
        return cls(np.sort(shorter), sum(look.is_grey for look in looks), float(np.median(1 - shorter / longer)))

    @property
    def median(self) -> int:
        """The middle shorter side."""
        return int(self.shorter[len(self.shorter) // 2])

    def enlarged(self, image_size: int) -> int:
        """Return how many pictures are smaller than ``image_size``."""
        return int((self.shorter < image_size).sum())


def sizes_of(rows: Rows, image_size: int) -> Sizes:
    """Return the sizes of the pictures; only their headers are read and, of very many in shards, those of some."""
    if not isinstance(rows.paths, ShardRows):
        return Sizes.of(look_at([Path(path) for path in rows.paths], image_size, decode=False))
    some = np.linspace(0, len(rows) - 1, min(len(rows), SOME)).astype(int)
    looks = look_at([partial(rows.paths.content, number) for number in some.tolist()], image_size, decode=False)
    return Sizes.of([look for look in looks if look.problem is None])


def counts_of(rows: Rows) -> np.ndarray:
    """Return how many images each of its classes has, (classes,) int64."""
    return np.bincount(rows.labels, minlength=len(rows.classes))


def note_of_uneven(rows: Rows) -> str | None:
    """Return a line for classes of very different numbers of images, or None."""
    counts = counts_of(rows)
    few, many = int(np.where(counts > 0, counts, counts.max()).argmin()), int(counts.argmax())
    if counts[many] < UNEVEN * counts[few]:
        return None
    return (
        f"warning: {rows.classes[many]} has {counts[many]:,} images and {rows.classes[few]} {counts[few]:,}: a class "
        "is drawn as often as it has images"
    )


def first_of_each_class(
    data: DataConfig, train: Rows, channels: int, seed: int, per_class: int, num_classes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the first images of each class that a run with ``seed`` takes, as they enter a step.

    Scaled, cut and mirrored as in its first epoch. Returns pixels (n, H, W, channels) uint8 and labels (n,) int64, by
    label: at most ``per_class`` of each of the first ``num_classes`` classes that have images.
    """
    param = data.dataset_param
    positions = np.arange(len(train), dtype=np.int64)
    images = SampleOrder(len(train), seed, data.dataloader_param.shuffle).images(positions)
    labels = train.labels[images]
    shown = np.unique(labels)[:num_classes]
    chosen = np.concatenate([positions[labels == label][:per_class] for label in shown])
    reader = source_of(param).visuals(train, param, channels)
    read = reader.read(images[chosen], reader.views_at(seed, chosen))
    return rearrange(read.arrays["pixels"], "n c h w -> n h w c"), train.labels[read.rows]
