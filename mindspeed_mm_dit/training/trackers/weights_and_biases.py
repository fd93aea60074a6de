"""A run for Weights & Biases: on disk, offline, unless WANDB_MODE says otherwise (``wandb sync`` uploads it later)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np


class WandbRun:
    """One run of a project, in ``folder``/wandb; ``facts``: its settings, by name."""

    def __init__(
        self, folder: str, project: str, entity: str | None, name: str | None, facts: Mapping[str, Any]
    ) -> None:
        import wandb

        self._wandb = wandb
        self._run = wandb.init(
            dir=folder,
            project=project,
            entity=entity,
            name=name,
            config=dict(facts),
            mode=os.environ.get("WANDB_MODE", "offline"),
            settings=wandb.Settings(console="off"),  # what the run prints stays where it prints it
        )

    def add(self, iteration: int, values: Mapping[str, float]) -> None:
        """Keep values by name."""
        self._run.log(dict(values), step=iteration)

    def add_picture(self, iteration: int, name: str, pixels: np.ndarray) -> None:
        """Keep a picture (H, W, 3) uint8."""
        self._run.log({name: self._wandb.Image(pixels)}, step=iteration)

    def close(self) -> None:
        """End the run."""
        self._run.finish()
