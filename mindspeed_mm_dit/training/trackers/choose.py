"""Which trackers the flags of a run ask for; one that fails costs its curves, not the run."""

from __future__ import annotations

import importlib.util
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.outputs import check_output_folder
from mindspeed_mm_dit.errors import ConfigError, PlatformError
from mindspeed_mm_dit.training.trackers.contract import Tracker
from mindspeed_mm_dit.training.trackers.swanlab_board import SwanLabRun
from mindspeed_mm_dit.training.trackers.tensorboard import Scalars
from mindspeed_mm_dit.training.trackers.weights_and_biases import WandbRun

PACKAGES = {"wandb": ("wandb",), "swanlab": ("swanlab", "swanboard")}
"""Optional extra -> what has to be importable for it; its flags are --EXTRA-project, --EXTRA-save-dir and so on."""

REQUIREMENTS = {"wandb": "wandb", "swanlab": "'swanlab[dashboard]'"}
"""Optional extra -> what pip installs for it."""

WANDB_LETTERS, WANDB_REFUSES = 128, "/\\#?%:"
"""Length of a project's name, and what it may not hold: those of wandb's Settings (0.28)."""


def open_trackers(args: Namespace, iteration: int) -> list[Tracker]:
    """Return the trackers of a run that starts after ``iteration``, on the rank that logs."""
    trackers: list[Tracker] = []
    if args.tensorboard_dir:
        trackers.append(Scalars(args.tensorboard_dir, iteration))
    facts = {name: value for name, value in vars(args).items() if isinstance(value, (bool, int, float, str))}
    if args.wandb_project:
        folder, name = folder_of(args, "wandb"), args.wandb_exp_name
        trackers.append(Guarded("wandb", lambda: WandbRun(folder, args.wandb_project, args.wandb_entity, name, facts)))
    if args.swanlab_project:
        board = folder_of(args, "swanlab")
        trackers.append(
            Guarded("swanlab", lambda: SwanLabRun(board, args.swanlab_project, args.swanlab_exp_name, facts))
        )
    return trackers


def folder_of(args: Namespace, extra: str) -> str:
    """Return where a tracker writes: what its flag says, or beside the --save folder (wandb makes its own there)."""
    given = getattr(args, f"{extra}_save_dir")
    if given or not args.save:
        return given or ""
    beside = Path(args.save).parent
    return str(beside if extra == "wandb" else beside / extra)


def check_trackers(args: Namespace) -> None:
    """Raise a UserError for a tracker that is not installed, or that has nowhere to write."""
    for extra, packages in PACKAGES.items():
        project = getattr(args, f"{extra}_project")
        if not project:
            continue
        what = f"--{extra}-project = {project}"
        missing = [package for package in packages if importlib.util.find_spec(package) is None]
        if missing:
            raise PlatformError(
                what, f"{missing[0]} is not installed", f"pip install {REQUIREMENTS[extra]}, or drop the flag"
            )
        if extra == "wandb":
            _check_name(what, project)
        if not folder_of(args, extra):
            raise ConfigError(what, "there is nowhere to keep it", f"add --save DIR or --{extra}-save-dir DIR")
        check_output_folder(f"--{extra}-save-dir", folder_of(args, extra), make=False)


def _check_name(what: str, project: str) -> None:
    """Raise ConfigError for a name that wandb refuses, which it does once the run has begun."""
    if len(project) > WANDB_LETTERS or set(project) & set(WANDB_REFUSES):
        raise ConfigError(
            what, f"Weights & Biases takes up to {WANDB_LETTERS} letters, and none of {' '.join(WANDB_REFUSES)}",
            "choose another name",
        )  # fmt: skip


class Guarded:
    """A tracker of another package: whatever it raises is said once, and is the end of its curves."""

    def __init__(self, name: str, start: Callable[[], Tracker]) -> None:
        self._name = name
        self._tracker: Tracker | None = None
        try:
            self._tracker = start()
        except Exception as error:  # (whatever that package raises)
            self._give_up(error)

    def add(self, iteration: int, values: Mapping[str, float]) -> None:
        """Keep values by name."""
        self._do("add", iteration, values)

    def add_picture(self, iteration: int, name: str, pixels: np.ndarray) -> None:
        """Keep a picture (H, W, 3) uint8."""
        self._do("add_picture", iteration, name, pixels)

    def close(self) -> None:
        """Have all of it on disk."""
        self._do("close")

    def _do(self, what: str, *given: Any) -> None:
        if self._tracker is None:
            return
        try:
            getattr(self._tracker, what)(*given)
        except Exception as error:  # (whatever that package raises)
            self._tracker = None
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        print(f"warning: {self._name}: keeps no more curves: {reason}; the run goes on", file=sys.stderr, flush=True)
