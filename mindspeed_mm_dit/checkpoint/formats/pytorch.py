"""A training checkpoint of PyTorch: a DCP folder with ``run.json``. Reading and writing need PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from mindspeed_mm_dit.checkpoint.compatibility import check_whole
from mindspeed_mm_dit.checkpoint.shapes import Shapes, predictor_of
from mindspeed_mm_dit.checkpoint.state import Arrays, State, unflatten
from mindspeed_mm_dit.checkpoint.store import iteration_of, read_facts
from mindspeed_mm_dit.errors import CheckpointError, PlatformError
from mindspeed_mm_dit.models.meta import parameters_of


def fits(path: Path) -> bool:
    """Return whether the folder ``path`` was written by PyTorch."""
    return (path / ".metadata").is_file()


def read(path: Path) -> State:
    """Read all tensors and the facts of the run; of a checkpoint of MindSpeed-MM, only tensors that we have too."""
    dcp = reader_of_pytorch_folder(path)
    check_whole(path, dcp.problem_of)
    facts = read_facts(path)
    if dcp.is_mindspeed_mm(path):
        tensors = dcp.read_theirs(path, _trained(dcp, path, facts))
        facts = {"iteration": iteration_of(path) or 0} | facts  # (a run that was killed there left no facts)
    else:
        tensors = dcp.read_tree(path)
    return State(unflatten({name: dcp.as_array(tensor) for name, tensor in tensors.items()}), facts)


def _trained(dcp: ModuleType, path: Path, facts: Mapping[str, Any]) -> Shapes:
    """Return name -> shape of the weights that were trained."""
    weight_shapes = {
        name.removeprefix("model."): shape for name, shape in dcp.shapes(path).items() if name[:6] == "model."
    }
    return parameters_of(predictor_of(weight_shapes, facts)).shapes(trained_only=True)


def write(path: Path, state: State) -> None:
    """Write all tensors, nested as a run writes them; the store adds the facts."""
    dcp = _writer()
    nested: dict[str, Any] = {tree: arrays for tree, arrays in state.trees.items() if tree != "optimizer"}
    if "optimizer" in state.trees:
        nested["optimizer"] = {"state": _by_parameter(state.trees["optimizer"])}
    dcp.write(_map(nested, dcp.as_tensor), path)


def _by_parameter(arrays: Arrays) -> dict[str, Arrays]:
    """Return ``state.NAME.KIND`` -> array as NAME -> KIND -> array."""
    nested: dict[str, Arrays] = {}
    for name, array in arrays.items():
        parameter, _, kind = name.removeprefix("state.").rpartition(".")
        nested.setdefault(parameter, {})[kind] = array
    return nested


def _map(tree: Any, function: Any) -> Any:
    return function(tree) if isinstance(tree, np.ndarray) else {key: _map(item, function) for key, item in tree.items()}


def _writer() -> ModuleType:
    try:
        from mindspeed_mm_dit.checkpoint import torch_dcp
    except ImportError as error:
        raise PlatformError(
            "a checkpoint folder of PyTorch",
            f"PyTorch is needed to write it: {error}",
            "pip install torch 'numpy<2'; MindSpore fits into the same environment",
        ) from None
    return torch_dcp


def reader_of_pytorch_folder(path: Path) -> ModuleType:
    """Return the module that reads the checkpoint folder ``path``.

    Raises:
        CheckpointError: it is no checkpoint.
        PlatformError: PyTorch, which wrote it, is not installed here.
    """
    if not (path / ".metadata").is_file():
        raise CheckpointError(
            str(path),
            "is a folder and no checkpoint: it has neither PyTorch's .metadata nor MindSpore's state.ckpt",
            "name a folder such as checkpoints/iter_0001000, or the one that holds them",
        )
    try:
        from mindspeed_mm_dit.checkpoint import torch_dcp
    except ImportError as error:
        raise PlatformError(
            str(path),
            f"was written by PyTorch, without which it cannot be read ({error})",
            f"in an environment with PyTorch: mm-dit convert {path} NEW_FOLDER --to mindspore (or any file format)",
        ) from None
    return torch_dcp
