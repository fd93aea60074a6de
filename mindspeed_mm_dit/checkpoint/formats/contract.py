"""What a format offers."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from mindspeed_mm_dit.checkpoint.state import State


class Room(Enum):
    """What a format has room for."""

    ONE_TREE = "one set of weights"
    WEIGHTS = "weights, their moving average, or both"
    ANYTHING = "weights, their moving average, the optimizer, or any of them"
    TRAINING = "all that --load needs: weights and their moving average, and the optimizer if there is one"


class Format(NamedTuple):
    """One way to store a :class:`State`."""

    fits: Callable[[Path], bool]
    """Whether an existing path is in this format."""
    read: Callable[[Path], State]
    """Read all of it; raises CheckpointError."""
    write: Callable[[Path, State], None]
    """Write a new file, or into an empty folder."""
    room: Room
    """What it can hold."""
    endings: tuple[str, ...] = ()
    """Endings of its files; none: it is a folder."""
