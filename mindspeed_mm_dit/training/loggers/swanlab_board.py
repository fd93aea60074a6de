"""--swanlab-project: a run for SwanLab's local dashboard, which needs no account: ``swanlab watch FOLDER``.

SWANLAB_MODE may send it elsewhere.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from mindspeed_mm_dit.training.loggers.contract import Board, MetricsLoggerKind, Opening, flag, in_save_folder


@dataclass(frozen=True)
class SwanLabConfig:
    """A run of a project."""

    project: str | None = flag("NAME", "keep a run of this project for SwanLab's dashboard")
    exp_name: str | None = flag("NAME", "name of the run; default: one that SwanLab makes up")
    save_dir: str | None = flag("DIR", "where it is kept; default: beside the --save folder")


def _open(config: SwanLabConfig, opening: Opening) -> Board:
    import swanlab

    run = swanlab.init(
        log_dir=opening.folder,
        project=config.project,
        name=config.exp_name,
        config=dict(opening.settings),
        mode=os.environ.get("SWANLAB_MODE", "local"),
    )
    return Board(swanlab, run)


KIND = MetricsLoggerKind(
    "swanlab", SwanLabConfig, _open, in_save_folder("swanlab"), packages=("swanlab", "swanboard"),
    install="'swanlab[dashboard]'",
)  # fmt: skip
