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

from mindspeed_mm_dit.checkpoint import checksums
from mindspeed_mm_dit.checkpoint.checksums import Checksum, open_with_checksum
from mindspeed_mm_dit.checkpoint.state import check_names
from mindspeed_mm_dit.checkpoint.store import BackgroundWriter, missing_optimizer_error
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.framework.mindspore_file import (
    read_mindspore_file,
    shapes_in_mindspore_file,
    write_mindspore_arrays,
)

Arrays = dict[str, np.ndarray]

FILE = "state.ckpt"


class Writer(BackgroundWriter):
    """Writes one checkpoint at a time, by default in a thread of the first worker."""

    _thread: threading.Thread | None = None

    def write(self, state: Arrays, path: Path, when_complete: Callable[[], object]) -> None:
        """Write ``state`` to the folder ``path``; then, on rank 0, call ``when_complete``.

        Call :meth:`wait` for the previous write first. It also returns any error.
        """
        from mindspeed_mm_dit.framework.mindspore import runtime  # (reading the files needs no MindSpore)

        if runtime.rank() != 0:
            return

        def work() -> None:
            write(path, state)
            when_complete()

        self._thread = threading.Thread(target=self._finish, args=(work, path))
        self._thread.start()
        if not self._in_background:
            self._thread.join()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def write(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays, and the checksum of their file, into the folder ``path``; scalars become (1,)."""
    sums: dict[str, Checksum] = {}
    with open_with_checksum(path / FILE, sums) as file:
        write_mindspore_arrays(file, {name: np.atleast_1d(array) for name, array in arrays.items()})
    checksums.write_checksums(path, sums)


def read(path: Path) -> Arrays:
    """Read every array of a checkpoint folder, or of a ``.ckpt`` file."""
    return read_mindspore_file(path / FILE if path.is_dir() else path)


def find_damage(path: Path, rank: int = 0, world_size: int = 1) -> str | None:
    """Return why the checkpoint ``path`` is damaged, or None; the workers share the reading."""
    if (path / ".metadata").is_file():
        raise CheckpointError(
            f"--load = {path.parent} was written by PyTorch. Convert it with mm-dit convert {path} NEW_FOLDER --to "
            "mindspore."
        )
    if not (path / FILE).is_file():
        return f"{FILE} is missing"
    return checksums.find_damage(path, rank, world_size)


def check_architecture(path: Path, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError, naming the tensors, unless ``path`` holds exactly ``expected`` under "model."."""
    shapes = shapes_in_mindspore_file(path / FILE)
    actual = {name[6:]: shape for name, shape in shapes.items() if name.startswith("model.")}
    check_names(expected, actual, f"--load = {path}")


def has_optimizer(path: Path) -> bool:
    """Return whether the checkpoint ``path`` holds an optimizer's state."""
    return any(name.startswith("optimizer.") for name in shapes_in_mindspore_file(path / FILE))


def read_state(path: Path, expected: Mapping[str, tuple[int, ...]], with_optimizer: bool) -> Arrays:
    """Read the state of a run.

    Raises:
        CheckpointError: the tensors under "model." are not exactly ``expected`` (the error names them), or there is no
            optimizer's state.
    """
    state = read(path)
    actual = {name[6:]: array.shape for name, array in state.items() if name.startswith("model.")}
    check_names(expected, actual, f"--load = {path}")
    if with_optimizer and not any(name.startswith("optimizer.") for name in state):
        raise missing_optimizer_error(path)
    return state


def entries_for_mindspeed_mm(facts: Mapping[str, Any], predictor: Any) -> Arrays:
    """Return nothing: MindSpeed-MM does not read this format."""
    return {}
