"""The formats of checkpoints by name, and the two in which a run saves: folders of PyTorch (DCP) and of MindSpore.

Each format is a registry entry of kind "checkpoint_format"; files of other programs are read by
``integrations/formats``. The first format that fits a path is the one that reads it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from mindspeed_mm_dit.checkpoint import mindspore_ckpt
from mindspeed_mm_dit.checkpoint.state import (
    Arrays,
    Shapes,
    State,
    check_are_floats,
    check_whole,
    flatten,
    infer_predictor,
    unflatten,
    without_projectors,
)
from mindspeed_mm_dit.checkpoint.store import iteration_of, read_facts
from mindspeed_mm_dit.configs.files import fetch_command
from mindspeed_mm_dit.errors import CheckpointError, ConfigError, PlatformError
from mindspeed_mm_dit.framework.mindspore_file import read_mindspore_file
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.registry import Registry


class StorageSupport(Enum):
    """What a format can store."""

    ONE_TREE = "one set of weights"
    WEIGHTS = "weights, their EMA, or both"
    ANYTHING = "weights, their EMA, the optimizer, or any of them"
    TRAINING = "all that --load needs: weights and their EMA, and the optimizer if there is one"


class Format(NamedTuple):
    """One way to store a :class:`State`."""

    fits: Callable[[Path], bool]
    """Return whether an existing path is in this format."""
    read: Callable[[Path], State]
    """Read all of it; raises CheckpointError."""
    write: Callable[[Path, State], None]
    """Write a new file, or fill an empty folder."""
    storage: StorageSupport
    """What it can store."""
    endings: tuple[str, ...] = ()
    """Endings of its files; empty if it is a folder."""
    facts: Callable[[Path], dict[str, Any]] = lambda path: {}
    """Return what is known of the run and its model.json, as in run.json."""
    labels: Callable[[Path], dict[str, int]] = lambda path: {}
    """Return the label of each class name; several names may share one."""
    second_network: Callable[[Path], Path | None] = lambda path: None
    """Return the expert of low noise that is stored with the network, if there is one."""


FORMATS = Registry[Format]("checkpoint_format")
"""By the name that --to takes."""


def format_of(path: Path) -> str | None:
    """Return the name of the format that ``path`` is in; None if it is in none."""
    return next((name for name, known in FORMATS.items() if known.fits(path)), None)


def format_of_source(path: Path) -> str:
    """Return the name of the format that SOURCE, ``path``, is in; raises CheckpointError if it is in none."""
    if (name := format_of(path)) is not None:
        return name
    if not path.exists():
        advice = fetch_command(path) or "Correct the path; only mm-dit get downloads."
        raise CheckpointError(f"SOURCE = {path} does not exist. {advice}")
    raise CheckpointError(f"SOURCE = {path} is in none of the formats {', '.join(FORMATS)}.")


def choose_format(path: Path, to: str | None, flag: str = "TARGET") -> str:
    """Return the name of the format that ``path``, the value of ``flag``, gets: ``to``, or the one of its ending."""
    by_ending = next((name for name, known in FORMATS.items() if path.suffix in known.endings), None)
    folders = [name for name, known in FORMATS.items() if not known.endings]
    if by_ending is None and to is None:
        raise ConfigError(
            f"{flag} = {path} has an ending that names no format. End it in .pt, .safetensors or .ckpt, or give --to "
            f"{'|'.join(folders)} for a folder."
        )
    name = to or by_ending
    if name is None or name not in FORMATS:
        raise ConfigError(f"--to = {to} is none of the formats {', '.join(FORMATS)}.")
    endings = FORMATS[name].endings
    if endings and path.suffix not in endings:
        raise ConfigError(f"{flag} = {path} does not look like --to {name}. End it in {' or '.join(endings)}.")
    if not endings and by_ending is not None:
        raise ConfigError(
            f"{flag} = {path} does not look like --to {name}, a folder. Give a folder, such as {path.with_suffix('')}."
        )
    return name


# --- weights of any format --------------------------------------------------------------------------------------------


def read_weights(path: str | Path, use_ema: bool = True) -> Arrays:
    """Return the predictor's weights in the checkpoint ``path``, float32 if they were of lower precision.

    path: a checkpoint folder of either framework (``iter_0001000``), or a file of weights by its ending. ``use_ema``
    prefers the EMA if both are there. Projectors to a teacher's features are left out.
    """
    path = Path(path)
    if path.is_dir():
        read = _reader(path)
        return without_projectors((read("ema") if use_ema else {}) or read("model"))
    known = next((known for known in FORMATS.values() if path.suffix in known.endings), None)
    if known is None:
        raise CheckpointError(
            f"{path} has the unknown ending {path.suffix!r}. Give a checkpoint folder, a .pt, .safetensors or .ckpt "
            "file."
        )
    return without_projectors(select_tree(known.read(path).trees, use_ema))


def select_tree(trees: Mapping[str, Arrays], use_ema: bool) -> Arrays:
    """Return the EMA or the weights, whichever is preferred; the other if it is missing."""
    return next(trees[name] for name in (("ema", "model") if use_ema else ("model", "ema")) if name in trees)


def read_trees(path: Path, trees: Sequence[str]) -> dict[str, Arrays]:
    """Return trees (e.g. "power_ema_1") of a checkpoint folder of either framework; check it for damage once."""
    read = _reader(path)
    return {tree: read(tree) for tree in trees}


def _reader(path: Path) -> Callable[[str], Arrays]:
    """Return what reads one tree of a checkpoint folder, which is checked for damage first."""
    if MINDSPORE.fits(path):
        trees = _read_mindspore(path).trees
        return lambda tree: trees.get(tree, {})
    dcp = _reader_of_pytorch(path)
    check_whole(path, dcp.find_damage)
    return lambda tree: {name: _array(value) for name, value in dcp.read_tree(path, tree).items()}


def _array(tensor: Any) -> np.ndarray:
    """Return a torch tensor as an array; low-precision floats become float32."""
    low = tensor.is_floating_point() and tensor.dtype.itemsize < 4
    return (tensor.float() if low else tensor).numpy(force=True)


# --- MindSpore: state.ckpt and run.json -------------------------------------------------------------------------------

_STEP = re.compile(r"optimizer\.state\..*\.step")


def read_ckpt(path: Path) -> dict[str, Arrays]:
    """Read the trees of a ``.ckpt``; a step counter, (1,) under MindSpore, becomes () as elsewhere."""
    arrays = read_mindspore_file(path)
    check_are_floats(arrays, str(path))
    return unflatten({n: a.reshape(()) if _STEP.fullmatch(n) and a.size == 1 else a for n, a in arrays.items()})


def _read_mindspore(path: Path) -> State:
    check_whole(path, mindspore_ckpt.find_damage)
    return State(read_ckpt(path / mindspore_ckpt.FILE), read_facts(path))


MINDSPORE = Format(
    fits=lambda path: (path / mindspore_ckpt.FILE).is_file(),
    read=_read_mindspore,
    write=lambda path, state: mindspore_ckpt.write(path, flatten(state.trees)),
    storage=StorageSupport.TRAINING,
    facts=read_facts,
)


# --- PyTorch: a DCP folder and run.json; reading and writing need PyTorch ---------------------------------------------


def _read_pytorch(path: Path) -> State:
    """Read all tensors and the facts of the run; of a checkpoint of MindSpeed-MM, only tensors that we have too."""
    dcp = _reader_of_pytorch(path)
    check_whole(path, dcp.find_damage)
    facts = read_facts(path)
    if dcp.is_mindspeed_mm(path):
        tensors = dcp.read_mindspeed_mm(path, _trained(dcp, path, facts))
        facts = {"iteration": iteration_of(path) or 0} | facts  # (a run that was killed there left no facts)
    else:
        tensors = dcp.read_tree(path)
    return State(unflatten({name: dcp.as_array(tensor) for name, tensor in tensors.items()}), facts)


def _trained(dcp: ModuleType, path: Path, facts: Mapping[str, Any]) -> Shapes:
    """Return name -> shape of the weights that were trained."""
    weight_shapes = {
        name.removeprefix("model."): shape for name, shape in dcp.shapes(path).items() if name.startswith("model.")
    }
    return parameters_of(infer_predictor(weight_shapes, facts)).shapes(trained_only=True)


def _write_pytorch(path: Path, state: State) -> None:
    """Write all tensors, nested as a run writes them; the store adds the facts."""
    try:
        from mindspeed_mm_dit.checkpoint import torch_dcp
    except ImportError as error:
        raise PlatformError(
            f"A checkpoint folder of PyTorch is written with PyTorch, which cannot be used here: {error}. Install it "
            "with pip install torch 'numpy<2'; MindSpore fits into the same environment."
        ) from None
    nested: dict[str, Any] = {
        tree: {name: torch_dcp.as_tensor(array) for name, array in arrays.items()}
        for tree, arrays in state.trees.items()
        if tree != "optimizer"
    }
    moments: dict[str, Any] = {}
    for name, array in state.trees.get("optimizer", {}).items():
        parameter, _, kind = name.removeprefix("state.").rpartition(".")
        moments.setdefault(parameter, {})[kind] = torch_dcp.as_tensor(array)
    torch_dcp.write(nested | ({"optimizer": {"state": moments}} if moments else {}), path)


def _reader_of_pytorch(path: Path) -> ModuleType:
    """Return the module that reads the checkpoint folder ``path``.

    Raises:
        CheckpointError: it is no checkpoint.
        PlatformError: PyTorch, which wrote it, is not installed here.
    """
    if not PYTORCH.fits(path):
        raise CheckpointError(
            f"{path} is a folder, but not a checkpoint: it has neither PyTorch's .metadata nor MindSpore's state.ckpt. "
            "Name a folder such as checkpoints/iter_0001000, or the one that holds them."
        )
    try:
        from mindspeed_mm_dit.checkpoint import torch_dcp
    except ImportError as error:
        raise PlatformError(
            f"{path} was written by PyTorch, without which it cannot be read ({error}). In an environment with "
            f"PyTorch, run mm-dit convert {path} NEW_FOLDER --to mindspore, or to a file."
        ) from None
    return torch_dcp


PYTORCH = Format(
    fits=lambda path: (path / ".metadata").is_file(),
    read=_read_pytorch,
    write=_write_pytorch,
    storage=StorageSupport.TRAINING,
    facts=read_facts,
)
