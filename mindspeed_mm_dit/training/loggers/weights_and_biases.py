"""--wandb-project: a run for Weights & Biases, kept offline on disk unless WANDB_MODE says otherwise.

``wandb sync`` uploads it later.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.training.loggers.contract import Board, MetricsLoggerKind, Opening, flag, in_save_folder

MOST_LETTERS, REFUSED = 128, "/\\#?%:"
"""Greatest length of a project's name, and letters that it must not contain: as in wandb's Settings (0.28)."""


@dataclass(frozen=True)
class WandbConfig:
    """A run of a project, with Megatron's flags."""

    project: str | None = flag("NAME", "keep a run of this project for Weights & Biases, offline")
    entity: str | None = flag("NAME", "owner of the project, if it is uploaded")
    exp_name: str | None = flag("NAME", "name of the run; default: one that wandb makes up")
    save_dir: str | None = flag("DIR", "where it is kept; default: beside the --save folder")

    def __post_init__(self) -> None:
        """Raise ConfigError for a name that wandb would refuse only once the run has begun."""
        name = self.project or ""
        if len(name) > MOST_LETTERS or set(name) & set(REFUSED):
            raise ConfigError(
                f"--wandb-project = {name}",
                f"Weights & Biases takes up to {MOST_LETTERS} letters, and none of {' '.join(REFUSED)}",
                "choose another name",
            )


def _open(config: WandbConfig, opening: Opening) -> Board:
    import wandb

    run = wandb.init(
        dir=opening.folder,
        project=config.project,
        entity=config.entity,
        name=config.exp_name,
        config=dict(opening.settings),
        mode=os.environ.get("WANDB_MODE", "offline"),
        settings=wandb.Settings(console="off"),  # leave what the run prints where it is
    )
    return Board(wandb, run)


KIND = MetricsLoggerKind(
    "wandb", WandbConfig, _open, in_save_folder(), packages=("wandb",), install="wandb", in_megatron=True
)  # (it makes a folder wandb there)
