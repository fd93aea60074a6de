"""The result of scanning a shard: labels and captions of its rows, and the position of each image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from mindspeed_mm_dit.data.image_captions import ImageCaptions


class ShardQuery(NamedTuple):
    """What to read for each row besides its image."""

    label: str | None = "label"
    """Column of the labels, in Parquet; None if no labels are needed."""
    captions: tuple[str, ...] = ()
    """Columns of the captions, or endings of their files."""


class Scanned(NamedTuple):
    """The rows of one shard, in order."""

    labels: Sequence[str]
    """The class of each row as it is written, or its name if the shard numbers names; "" if labels are not needed."""
    where: np.ndarray
    """(n, 2) int64: position of each image in the shard, for its reader."""
    names: tuple[str, ...] = ()
    """Names of the labels in the order of their numbers, if the shard lists them."""
    left_out: Mapping[str, int] = MappingProxyType({})
    """Number of files that are left out, by kind."""
    read_bytes: int = 0
    """Largest number of bytes read for one random image, if more than the image itself; else 0."""
    captions: Sequence[ImageCaptions] = ()
    """Captions of each row; empty if captions are not needed."""
