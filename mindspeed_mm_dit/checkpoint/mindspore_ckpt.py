"""Checkpoints as MindSpore ``.ckpt`` files, written by the first worker.

The names are those of the PyTorch checkpoints (``model.blocks.0.attn.qkv.weight``, ``optimizer.state...``), so
converting from one to the other renames nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit.checkpoint.store import BackgroundWriter, without_optimizer
from mindspeed_mm_dit.checkpoint.weights import check_names
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.framework.mindspore_file import (
    read_mindspore_file,
    shapes_in_mindspore_file,
    write_mindspore_file,
)

Arrays = dict[str, np.ndarray]

FILE = "state.ckpt"
SIZE = "state.ckpt.bytes"


class Writer(BackgroundWriter):
    """Writes one checkpoint at a time, by default in a thread of the first worker."""

    def __init__(self, in_background: bool) -> None:
        super().__init__()
        self._in_background = in_background
        self._thread: threading.Thread | None = None

    def write(self, state: Arrays, path: Path, when_complete: Callable[[], object]) -> None:
        """Write ``state`` to the folder ``path``; then, on rank 0, call ``when_complete``.

        An error shows in :meth:`wait`.
        """
        from mindspeed_mm_dit.framework.mindspore import runtime  # (what reads the files needs no MindSpore)

        self.wait()
        self._folder = path.parent
        if runtime.rank() != 0:
            return
        self._thread = threading.Thread(target=self._write, args=(state, path, when_complete))
        self._thread.start()
        if not self._in_background:
            self._thread.join()

    def _write(self, state: Arrays, path: Path, when_complete: Callable[[], object]) -> None:
        try:
            write(path, state)
            when_complete()
        except BaseException as error:  # (kept for the training thread)
            self._problem = error

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def write(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays into the folder ``path``; scalars become (1,)."""
    write_mindspore_file(path / FILE, {name: np.atleast_1d(array) for name, array in arrays.items()})
    (path / SIZE).write_text(str((path / FILE).stat().st_size))


def read(path: Path) -> Arrays:
    """Read every array of a checkpoint folder, or of a ``.ckpt`` file."""
    return read_mindspore_file(path / FILE if path.is_dir() else path)


def problem_of(path: Path) -> str | None:
    """Return why the checkpoint ``path`` is incomplete, or None."""
    if (path / ".metadata").is_file():
        raise CheckpointError(
            f"--load = {path.parent}",
            "was written by PyTorch",
            f"convert it: mm-dit convert {path} NEW_FOLDER --to mindspore",
        )
    if not (path / FILE).is_file() or not (path / SIZE).is_file():
        return f"{FILE} is missing"
    if (path / FILE).stat().st_size != int((path / SIZE).read_text() or "0"):
        return f"{FILE} is cut short"
    return None


def check_architecture(path: Path, wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError, naming the tensors, unless ``path`` holds exactly ``wanted`` under "model."."""
    shapes = shapes_in_mindspore_file(path / FILE)
    found = {name[6:]: shape for name, shape in shapes.items() if name.startswith("model.")}
    check_names(wanted, found, f"--load = {path}")


def has_optimizer(path: Path) -> bool:
    """Return whether the checkpoint ``path`` holds moments of an optimizer."""
    return any(name.startswith("optimizer.") for name in shapes_in_mindspore_file(path / FILE))


def read_state(path: Path, wanted: Mapping[str, tuple[int, ...]], with_optimizer: bool) -> Arrays:
    """Read the state of a run.

    Raises:
        CheckpointError: under "model." it does not hold exactly ``wanted`` (the tensors are named), or it has no
            optimizer's state.
    """
    state = read(path)
    found = {name[6:]: array.shape for name, array in state.items() if name.startswith("model.")}
    check_names(wanted, found, f"--load = {path}")
    if with_optimizer and not any(name.startswith("optimizer.") for name in state):
        raise without_optimizer(path)
    return state


def entries_for_mindspeed_mm(facts: Mapping[str, Any], predictor: Any) -> Arrays:
    """Nothing: MindSpeed-MM does not read this format."""
    return {}
