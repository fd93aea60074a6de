"""A MindSpore ``.ckpt`` file: one set of weights by their own names, or several as ``model.NAME``, ``ema.NAME``."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from mindspeed_mm_dit.checkpoint.quantized import check_are_floats
from mindspeed_mm_dit.checkpoint.state import State, flatten, unflatten
from mindspeed_mm_dit.framework.mindspore_file import read_mindspore_file, write_mindspore_file

_STEP = re.compile(r"optimizer\.state\..*\.step")


def fits(path: Path) -> bool:
    """Return whether ``path`` is a MindSpore file, by its ending."""
    return path.is_file() and path.suffix == ".ckpt"


def read(path: Path) -> State:
    """Read all arrays; a step counter, (1,) under MindSpore, becomes () as elsewhere."""
    arrays = read_mindspore_file(path)
    check_are_floats(arrays, str(path))
    return State(unflatten({n: a.reshape(()) if _STEP.fullmatch(n) and a.size == 1 else a for n, a in arrays.items()}))


def write(path: Path, state: State) -> None:
    """Write all arrays; () becomes (1,)."""
    arrays = state.weights if set(state.trees) == {"model"} else flatten(state.trees)
    write_mindspore_file(path, {name: np.atleast_1d(array) for name, array in arrays.items()})
