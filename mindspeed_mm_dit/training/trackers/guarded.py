"""A tracker that costs its curves where it fails, not the run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mindspeed_mm_dit.training.trackers.contract import Opening, Tracker, TrackerKind


class Guarded:
    """A tracker whose first failure, whatever it is, is said and is the end of its curves."""

    def __init__(self, kind: TrackerKind, config: Any, opening: Opening) -> None:
        self._name = kind.name
        self._tracker: Tracker | None = None
        try:
            self._tracker = kind.open(config, opening)
        except Exception as error:  # (whatever its package raises)
            self._give_up(error)

    def add(self, iteration: int, values: Mapping[str, float]) -> None:
        """Keep values by name."""
        self._do(lambda tracker: tracker.add(iteration, values))

    def add_picture(self, iteration: int, name: str, pixels: np.ndarray) -> None:
        """Keep a picture (H, W, 3) uint8."""
        self._do(lambda tracker: tracker.add_picture(iteration, name, pixels))

    def close(self) -> None:
        """Have all of it on disk."""
        self._do(lambda tracker: tracker.close())

    def _do(self, what: Callable[[Tracker], None]) -> None:
        if self._tracker is None:
            return
        try:
            what(self._tracker)
        except Exception as error:  # (whatever its package raises)
            self._tracker = None
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        print(f"warning: {self._name}: keeps no more curves: {reason}; the run goes on", file=sys.stderr, flush=True)
