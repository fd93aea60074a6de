"""The interface of a checkpoint format."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from mindspeed_mm_dit.checkpoint.state import State


class StorageSupport(Enum):
    """What a format can store."""

    ONE_TREE = "one set of weights"
    WEIGHTS = "weights, their EMA, or both"
    ANYTHING = "weights, their EMA, the optimizer, or any of them"
    TRAINING = "all that --load needs: weights and their EMA, and the optimizer if there is one"


class Format(NamedTuple):
    """One way to store a :class:`State`."""

    fits: Callable[[Path], bool]
    """Return whether an existing path is in this format."""
    read: Callable[[Path], State]
    """Read all of it; raises CheckpointError."""
    write: Callable[[Path, State], None]
    """Write a new file, or fill an empty folder."""
    storage: StorageSupport
    """What it can store."""
    endings: tuple[str, ...] = ()
    """Endings of its files; empty if it is a folder."""
