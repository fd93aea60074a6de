"""Read a predictor's weights from a checkpoint of any known format, as arrays by their published names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit.checkpoint.compatibility import check_whole
from mindspeed_mm_dit.checkpoint.formats import FORMATS, mindspore, pytorch
from mindspeed_mm_dit.checkpoint.published import without_projectors
from mindspeed_mm_dit.errors import CheckpointError

Arrays = dict[str, np.ndarray]


def read_weights(path: str | Path, use_ema: bool = True) -> Arrays:
    """Return the predictor's weights in the checkpoint ``path``, float32 if they were of lower precision.

    path: a checkpoint folder of either framework (``iter_0001000``), a ``.pt`` as facebookresearch/DiT writes or
    publishes it, a ``.safetensors``, or a MindSpore ``.ckpt``. ``use_ema`` prefers the EMA if the file holds both.
    Projectors to a teacher's features are left out.
    """
    path = Path(path)
    if path.is_dir():
        read = _reader(path)
        return without_projectors((read("ema") if use_ema else {}) or read("model"))
    known = next((known for known in FORMATS.values() if path.suffix in known.endings), None)
    if known is None:
        raise CheckpointError(
            str(path),
            f"has the unknown ending {path.suffix!r}",
            "give a checkpoint folder, a .pt, .safetensors or .ckpt file",
        )
    return without_projectors(preferred(known.read(path).trees, use_ema))


def preferred(trees: Mapping[str, Arrays], use_ema: bool) -> Arrays:
    """Return the EMA or the weights, whichever is preferred; the other if it is missing."""
    return next(trees[name] for name in (("ema", "model") if use_ema else ("model", "ema")) if name in trees)


def read_trees(path: Path, trees: Sequence[str]) -> dict[str, Arrays]:
    """Return trees (e.g. "power_ema_1") of a checkpoint folder of either framework; check it for damage once."""
    read = _reader(path)
    return {tree: read(tree) for tree in trees}


def _reader(path: Path) -> Callable[[str], Arrays]:
    """Return what reads one tree of a checkpoint folder, which is checked for damage first."""
    if mindspore.fits(path):
        trees = mindspore.read(path).trees
        return lambda tree: trees.get(tree, {})
    dcp = pytorch.reader_of_pytorch_folder(path)
    check_whole(path, dcp.problem_of)
    return lambda tree: {name: _array(value) for name, value in dcp.read_tree(path, tree).items()}


def _array(tensor: Any) -> np.ndarray:
    """Return a torch tensor as an array; low-precision floats become float32."""
    low = tensor.is_floating_point() and tensor.dtype.itemsize < 4
    return (tensor.float() if low else tensor).numpy(force=True)
