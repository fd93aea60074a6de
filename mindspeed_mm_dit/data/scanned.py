"""What a look through a shard finds: the labels of its rows, and where each picture stands."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Scanned(NamedTuple):
    """The rows of one shard, in its order."""

    labels: np.ndarray
    """(n,) int64, or names."""
    where: np.ndarray
    """(n, 2) int64: what finds the picture again."""
    names: tuple[str, ...] = ()
    """Names of the labels, if the shard gives them."""
    left_out: int = 0
    """Rows without a picture or without a label."""
    read_bytes: int = 0
    """The most that is read for one picture drawn at random, if that is more than the picture."""
