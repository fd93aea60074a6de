"""--wandb-project: a run for Weights & Biases: on disk, offline, unless WANDB_MODE says otherwise.

``wandb sync`` uploads it later.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.training.trackers.contract import Opening, TrackerKind, flag

MOST_LETTERS, REFUSED = 128, "/\\#?%:"
"""Length of a project's name, and what it may not hold: those of wandb's Settings (0.28)."""


@dataclass(frozen=True)
class WandbConfig:
    """A run of a project, by Megatron's flags."""

    project: str | None = flag("NAME", "keep a run of this project for Weights & Biases, offline")
    entity: str | None = flag("NAME", "who the project belongs to, where it is uploaded")
    exp_name: str | None = flag("NAME", "name of the run; default: one that wandb makes up")
    save_dir: str | None = flag("DIR", "where it is kept; default: beside the --save folder")

    def __post_init__(self) -> None:
        """Raise ConfigError for a name that wandb refuses, which it does once the run has begun."""
        name = self.project or ""
        if len(name) > MOST_LETTERS or set(name) & set(REFUSED):
            raise ConfigError(
                f"--wandb-project = {name}",
                f"Weights & Biases takes up to {MOST_LETTERS} letters, and none of {' '.join(REFUSED)}",
                "choose another name",
            )


class WandbRun:
    """One run of a project."""

    def __init__(self, config: WandbConfig, opening: Opening) -> None:
        import wandb

        self._wandb = wandb
        self._run = wandb.init(
            dir=opening.folder,
            project=config.project,
            entity=config.entity,
            name=config.exp_name,
            config=dict(opening.settings),
            mode=os.environ.get("WANDB_MODE", "offline"),
            settings=wandb.Settings(console="off"),  # what the run prints stays where it prints it
        )

    def add(self, iteration: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=iteration)

    def add_picture(self, iteration: int, name: str, pixels: np.ndarray) -> None:
        self._run.log({name: self._wandb.Image(pixels)}, step=iteration)

    def close(self) -> None:
        self._run.finish()


def _place(config: WandbConfig, beside: Path | None) -> Path | None:
    return Path(config.save_dir) if config.save_dir else beside  # (in which it makes a folder wandb)


KIND = TrackerKind("wandb", WandbConfig, WandbRun, _place, packages=("wandb",), install="wandb", in_megatron=True)
