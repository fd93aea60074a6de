"""PyTorch files of facebookresearch/DiT: published (a bare state dict), trained ({"model", "ema", "opt", "args"})."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspeed_mm_dit.checkpoint.published import trees_of
from mindspeed_mm_dit.checkpoint.state import State
from mindspeed_mm_dit.checkpoint.store import check_facts
from mindspeed_mm_dit.framework.torch_file import read_torch_file, write_torch_file

_OUR_FACTS = {"iteration", "consumed_samples"}


def fits(path: Path) -> bool:
    """Return whether ``path`` is a PyTorch file, by its ending."""
    return path.is_file() and path.suffix in (".pt", ".pth", ".bin")


def read(path: Path) -> State:
    """Read weights and EMA; the optimizer's state is skipped, as its tensors have no names there."""
    content = read_torch_file(path)
    trees = trees_of(content, path)
    args = content.get("args")
    facts = dict(args) if isinstance(args, Mapping) and args.keys() >= _OUR_FACTS else {}
    check_facts(facts, path)
    return State(trees, facts)


def write(path: Path, state: State) -> None:
    """Write a bare state dict if there is one set of weights, else both sets and the facts of the run as "args"."""
    if len(state.trees) == 1:
        write_torch_file(path, state.weights)
        return
    content: dict[str, Any] = {**state.trees, "args": state.facts}
    write_torch_file(path, content)
