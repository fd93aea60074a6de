"""A training checkpoint of MindSpore: a folder with ``state.ckpt`` and ``run.json``."""

from __future__ import annotations

from pathlib import Path

from mindspeed_mm_dit.checkpoint import mindspore_ckpt
from mindspeed_mm_dit.checkpoint.compatibility import check_whole
from mindspeed_mm_dit.checkpoint.formats import ckpt
from mindspeed_mm_dit.checkpoint.state import State, flatten
from mindspeed_mm_dit.checkpoint.store import read_facts


def fits(path: Path) -> bool:
    """Return whether the folder ``path`` was written by MindSpore."""
    return (path / mindspore_ckpt.FILE).is_file()


def read(path: Path) -> State:
    """Read all arrays and the facts of the run."""
    check_whole(path, mindspore_ckpt.problem_of)
    return State(ckpt.read(path / mindspore_ckpt.FILE).trees, read_facts(path))


def write(path: Path, state: State) -> None:
    """Write all arrays; the store adds the facts."""
    mindspore_ckpt.write(path, flatten(state.trees))
