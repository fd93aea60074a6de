"""A run for SwanLab's local dashboard, which needs no account: ``swanlab watch FOLDER``; or as SWANLAB_MODE says."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np


class SwanLabRun:
    """One run of a project, in ``folder``; ``facts``: its settings, by name."""

    def __init__(self, folder: str, project: str, name: str | None, facts: Mapping[str, Any]) -> None:
        import swanlab

        self._swanlab = swanlab
        mode: Any = os.environ.get("SWANLAB_MODE", "local")
        self._run = swanlab.init(log_dir=folder, project=project, name=name, config=dict(facts), mode=mode)

    def add(self, iteration: int, values: Mapping[str, float]) -> None:
        """Keep values by name."""
        self._run.log(dict(values), step=iteration)

    def add_picture(self, iteration: int, name: str, pixels: np.ndarray) -> None:
        """Keep a picture (H, W, 3) uint8."""
        self._run.log({name: self._swanlab.Image(pixels)}, step=iteration)

    def close(self) -> None:
        """End the run."""
        self._run.finish()
