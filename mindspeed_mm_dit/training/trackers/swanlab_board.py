"""--swanlab-project: a run for SwanLab's local dashboard, which needs no account: ``swanlab watch FOLDER``.

SWANLAB_MODE may say where else it goes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mindspeed_mm_dit.training.trackers.contract import Opening, TrackerKind, flag


@dataclass(frozen=True)
class SwanLabConfig:
    """A run of a project."""

    project: str | None = flag("NAME", "keep a run of this project for SwanLab's dashboard")
    exp_name: str | None = flag("NAME", "name of the run; default: one that SwanLab makes up")
    save_dir: str | None = flag("DIR", "where it is kept; default: beside the --save folder")


class SwanLabRun:
    """One run of a project."""

    def __init__(self, config: SwanLabConfig, opening: Opening) -> None:
        import swanlab

        self._swanlab = swanlab
        self._run = swanlab.init(
            log_dir=opening.folder,
            project=config.project,
            name=config.exp_name,
            config=dict(opening.settings),
            mode=os.environ.get("SWANLAB_MODE", "local"),
        )

    def add(self, iteration: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=iteration)

    def add_picture(self, iteration: int, name: str, pixels: np.ndarray) -> None:
        self._run.log({name: self._swanlab.Image(pixels)}, step=iteration)

    def close(self) -> None:
        self._run.finish()


def _place(config: SwanLabConfig, beside: Path | None) -> Path | None:
    if config.save_dir:
        return Path(config.save_dir)
    return beside / "swanlab" if beside is not None else None


KIND = TrackerKind(
    "swanlab", SwanLabConfig, SwanLabRun, _place, packages=("swanlab", "swanboard"), install="'swanlab[dashboard]'"
)
