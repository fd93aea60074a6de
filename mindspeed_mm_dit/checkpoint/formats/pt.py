"""PyTorch files of facebookresearch/DiT: published (a bare state dict), trained ({"model", "ema", "opt", "args"})."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit.checkpoint.published import plain, trees_of
from mindspeed_mm_dit.checkpoint.state import State
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.framework.torch_file import read_torch_file, write_torch_file

_OUR_FACTS = {"iteration", "consumed_samples"}


def fits(path: Path) -> bool:
    """Return whether ``path`` is a PyTorch file, by its ending."""
    return path.is_file() and path.suffix in (".pt", ".pth", ".bin")


def read(path: Path) -> State:
    """Read weights and EMA; the optimizer's state is skipped, as its tensors have no names there."""
    content = read_torch_file(path)
    if not isinstance(content, Mapping):
        raise CheckpointError(str(path), f"holds a {type(content).__name__}, not a dict")
    content = content["state_dict"] if isinstance(content.get("state_dict"), Mapping) else content
    trees = trees_of(content)
    if not trees and content and all(isinstance(value, np.ndarray) for value in content.values()):
        trees = {"model": plain(content)}
    if not trees:
        raise CheckpointError(str(path), f"holds no weights; its keys are: {', '.join(map(str, list(content)[:8]))}")
    args = content.get("args")
    return State(trees, dict(args) if isinstance(args, Mapping) and args.keys() >= _OUR_FACTS else {})


def write(path: Path, state: State) -> None:
    """Write a bare state dict if there is one set of weights, else both sets and the facts of the run as "args"."""
    if len(state.trees) == 1:
        write_torch_file(path, state.weights)
        return
    content: dict[str, Any] = {**state.trees, "args": state.facts}
    write_torch_file(path, content)
