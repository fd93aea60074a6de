"""What keeps the curves and pictures of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np


class Tracker(Protocol):
    """To add one: a class with these names, and its line in ``choose.open_trackers``."""

    def add(self, iteration: int, values: Mapping[str, float]) -> None:
        """Keep values by name; iterations never go down."""

    def add_picture(self, iteration: int, name: str, pixels: np.ndarray) -> None:
        """Keep a picture (H, W, 3) uint8."""

    def close(self) -> None:
        """Have all of it on disk."""
