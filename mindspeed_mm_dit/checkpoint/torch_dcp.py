"""Checkpoints as PyTorch distributed checkpoints (DCP): sharded, asynchronous, readable on any number of ranks.

A state is a nested dict of tensors with string keys; DCP flattens it to names such as
``model.blocks.0.attn.qkv.weight``.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from mindspeed_mm_dit.checkpoint import checksums, mindspeed_mm
from mindspeed_mm_dit.checkpoint.mindspeed_mm import entries_for_mindspeed_mm as entries_for_mindspeed_mm
from mindspeed_mm_dit.checkpoint.state import check_names
from mindspeed_mm_dit.checkpoint.store import MISSING_INDEX, BackgroundWriter, is_missing_index, read_error
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.framework.contract import lazy_module
from mindspeed_mm_dit.framework.pytorch import runtime
from mindspeed_mm_dit.framework.pytorch.optim import is_sharded
from mindspeed_mm_dit.optimizers import adam
from mindspeed_mm_dit.optimizers.contract import STEP

if TYPE_CHECKING:
    import torch.distributed.checkpoint as dcp

    from mindspeed_mm_dit.checkpoint import torch_folder
else:  # a run's first step needs none of them, and they take a second
    dcp = lazy_module("torch.distributed.checkpoint")
    torch_folder = lazy_module("mindspeed_mm_dit.checkpoint.torch_folder")

State = dict[str, Any]

# (PyTorch 2.7 triggers it while it writes, in a thread that no catch_warnings reaches)
warnings.filterwarnings("ignore", message="TypedStorage is deprecated")


class Writer(BackgroundWriter):
    """Writes one checkpoint at a time, by default in the background, on a separate CPU process group."""

    def __init__(self, in_background: bool, when_failed: Callable[[CheckpointError], object] | None = None) -> None:
        super().__init__(in_background, when_failed)
        self._group = runtime.host_process_group()
        self._pending: Future[Any] | None = None

    def copy_to_host(self, state: State) -> State:
        """Return this rank's part of ``state``; for a write in the background, as copies.

        The copies are complete once the device is synchronised. DCP's staging does not copy them again.
        """
        part = _part_of_this_rank(state, dist.get_rank(), dist.get_world_size())
        return _copied(part) if self._in_background else part

    def write(self, state: State, path: Path, when_complete: Callable[[], object]) -> None:
        """Write what ``copy_to_host`` returned to the folder ``path``; then, on rank 0, call ``when_complete``.

        Call :meth:`wait` for the previous write first. The tensors may change as soon as this returns. An error on any
        rank is known to all of them; :meth:`wait` returns it.
        """
        to_disk = {"storage_writer": torch_folder.ChecksumWriter(path), "process_group": self._group}

        def finish(written: Callable[[], object]) -> None:
            written()
            if dist.get_rank() == 0:
                when_complete()

        if not self._in_background:
            self._finish(lambda: finish(lambda: dcp.save(state, **to_disk)), path)
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pending = dcp.async_save(_wait_for_copies(state), **to_disk)
        done: Future[None] = Future()
        self._pending = done

        def in_background(written: Future[Any]) -> None:
            try:
                self._finish(lambda: finish(written.result), path)
            finally:
                done.set_result(None)

        assert isinstance(pending, Future)
        pending.add_done_callback(in_background)

    def _join(self) -> None:
        if self._pending is not None:
            self._pending.result()
            self._pending = None


def _part_of_this_rank(state: State, rank: int, world_size: int) -> State:
    """Return what this rank writes: of the replicated tensors every ``world_size``-th, as DCP copies all that it gets.

    Sharded tensors and values that are no tensors are in every rank's part.
    """
    turns = itertools.count()

    def part(tree: State) -> State:
        local = {}
        for key, value in tree.items():
            is_replicated = isinstance(value, torch.Tensor) and not is_sharded(value)
            if isinstance(value, dict):
                local[key] = part(value)
            elif not is_replicated or next(turns) % world_size == rank:
                local[key] = value
        return local

    return part(state)


def _wait_for_copies(copies: State) -> State:
    """Wait until the copies of a state are complete."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return copies


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(part) for key, part in value.items()}
    return value.to("cpu", non_blocking=True, copy=True) if isinstance(value, torch.Tensor) else value


def read(state: State, path: Path, partial: bool = False) -> None:
    """Fill the tensors of ``state`` in place from the checkpoint ``path``, whichever ranks wrote it.

    ``partial``: tensors that the checkpoint lacks keep their values.
    """
    stored = torch_folder.read_metadata(path).state_dict_metadata
    if not mindspeed_mm.is_mindspeed_mm(stored.keys()):
        _load(state, path, partial)
        return
    ours = _flatten(state)
    theirs = mindspeed_mm.stored_names(ours, stored.keys())
    tensors: dict[str, list[torch.Tensor]] = {}
    for name, value in ours.items():
        tensors.setdefault(theirs[name], []).append(value)
    numbers = {name for name in tensors if isinstance(stored.get(name), dcp.metadata.BytesStorageMetadata)}
    _load({name: values[0] for name, values in tensors.items() if name not in numbers}, path, partial)
    for name in numbers:
        tensors[name][0].fill_(torch_folder.read_number(path, name))
    for first, *others in tensors.values():  # one step counter serves a whole group there
        for value in others:
            value.copy_(first)


def _load(state: State, path: Path, partial: bool, alone: bool = False) -> None:
    no_dist = alone or not (dist.is_available() and dist.is_initialized())
    planner = torch_folder.TensorsOnlyPlanner(allow_partial_load=partial)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(state, storage_reader=torch_folder.SafeFileReader(path), planner=planner, no_dist=no_dist)
    except dcp.api.CheckpointException as error:
        raise read_error(error, path) from error


def write(state: State, path: Path) -> None:
    """Write ``state`` to the folder ``path`` from a single process without a process group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=torch_folder.ChecksumWriter(path), no_dist=True)


def _flatten(state: State, prefix: str = "") -> dict[str, torch.Tensor]:
    flat: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        flat.update(_flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return flat


def shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every tensor in the checkpoint ``path``; the EMA is under "ema.", whoever wrote it."""
    entries = torch_folder.read_metadata(path).state_dict_metadata
    return {
        mindspeed_mm.to_project_name(name): tuple(entry.size)
        for name, entry in entries.items()
        if isinstance(entry, dcp.metadata.TensorStorageMetadata)
    }


def read_tree(path: Path, prefix: str = "") -> dict[str, torch.Tensor]:
    """Read every tensor whose name starts with ``prefix`` + "." into CPU memory, by the rest of its name.

    Without a prefix every tensor is read, by its whole name. Each rank reads for itself: others need not call this.
    """
    start = f"{prefix}." if prefix else ""
    entries = torch_folder.read_metadata(path).state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if mindspeed_mm.to_project_name(name).startswith(start)
        and isinstance(entry, dcp.metadata.TensorStorageMetadata)
    }
    _load(tensors, path, partial=False, alone=True)
    return {mindspeed_mm.to_project_name(name)[len(start) :]: value for name, value in tensors.items()}


def is_mindspeed_mm(path: Path) -> bool:
    """Return whether MindSpeed-MM wrote the checkpoint ``path``."""
    return mindspeed_mm.is_mindspeed_mm(torch_folder.read_metadata(path).state_dict_metadata.keys())


def read_mindspeed_mm(path: Path, trained: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Read a checkpoint of MindSpeed-MM into CPU memory, by our names: weights, EMA, and the optimizer's state.

    ``trained``: name -> shape of the weights that the optimizer updates. Everything else is left out.
    """
    expected = {name: shape for name, shape in shapes(path).items() if name.startswith(("model.", "ema."))}
    if has_optimizer(path):
        for name, shape in trained.items():
            sizes = {STEP: (), **dict.fromkeys(adam.RULE.state, shape)}
            expected |= {f"optimizer.state.{name}.{kind}": size for kind, size in sizes.items()}
    state = {name: torch.empty(shape) for name, shape in expected.items()}
    read(state, path)
    return state


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor as an array; bfloat16 and float8, which NumPy lacks, become float32."""
    is_lacking = tensor.dtype == torch.bfloat16 or (tensor.is_floating_point() and tensor.dtype.itemsize == 1)
    return (tensor.float() if is_lacking else tensor).numpy(force=True)


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """Return an array, whose dtype PyTorch must know, as a tensor."""
    return torch.from_numpy(np.require(array, requirements=["C", "A", "W"]))


def find_damage(path: Path, rank: int = 0, world_size: int = 1) -> str | None:
    """Return why the checkpoint ``path`` is damaged, or None; the ranks share the reading.

    Each file must match its checksum, and every byte that the index names must be there.
    """
    if (path / "state.ckpt").is_file():
        raise CheckpointError(
            f"--load = {path.parent} was written by MindSpore. Convert it with mm-dit convert {path} NEW_FOLDER --to "
            "pytorch."
        )
    return _problem_by_index(path) or checksums.find_damage(path, rank, world_size)


def _problem_by_index(path: Path) -> str | None:
    """Return what is missing by the index, on every rank alike; each checks the index before reading it."""
    if is_missing_index(path):
        return MISSING_INDEX
    if problem := checksums.find_file_damage(path / ".metadata"):
        return problem
    try:
        for entry in (torch_folder.read_metadata(path).storage_data or {}).values():
            file = path / entry.relative_path
            if not file.is_file():
                return f"{file.name} is missing"
            if file.stat().st_size < entry.offset + entry.length:
                return f"{file.name} is cut short"
    except CheckpointError:
        raise
    except Exception as error:  # (a damaged pickle raises anything)
        return f".metadata cannot be read: {type(error).__name__}"
    return None


def has_optimizer(path: Path) -> bool:
    """Return whether the checkpoint ``path`` holds an optimizer's state."""
    return any("optimizer" in name for name in torch_folder.read_metadata(path).state_dict_metadata)


def check_architecture(path: Path, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError, naming the tensors, unless ``path`` holds exactly ``expected`` under "model."."""
    actual = {name[6:]: shape for name, shape in shapes(path).items() if name.startswith("model.")}
    check_names(expected, actual, f"--load = {path}")
