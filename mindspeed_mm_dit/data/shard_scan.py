"""What a look through a shard finds: the labels and captions of its rows, and where each image stands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mindspeed_mm_dit.data.image_captions import Told


class Sought(NamedTuple):
    """What is looked for of each row, beside its image."""

    label: str | None = "label"
    """Column of the labels, in Parquet; None: no label is."""
    captions: tuple[str, ...] = ()
    """Columns of the captions, or endings of their files."""


class Scanned(NamedTuple):
    """The rows of one shard, in its order."""

    labels: np.ndarray
    """(n,) int64, or names; zeros where none are sought."""
    where: np.ndarray
    """(n, 2) int64: what finds the image again."""
    names: tuple[str, ...] = ()
    """Names of the labels, if the shard gives them."""
    left_out: int = 0
    """Rows without an image or without a label."""
    read_bytes: int = 0
    """The most that is read for one image drawn at random, if that is more than the image."""
    told: Sequence[Told] = ()
    """What is said of each row; empty where no captions are sought."""
