"""Read a predictor's weights from a checkpoint of any known format, as arrays by their published names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit.checkpoint.compatibility import check_whole
from mindspeed_mm_dit.checkpoint.formats import pt, safetensors
from mindspeed_mm_dit.checkpoint.formats.pytorch import reader_of_pytorch_folder
from mindspeed_mm_dit.checkpoint.published import without_projectors
from mindspeed_mm_dit.errors import CheckpointError

Arrays = dict[str, np.ndarray]


def read_weights(path: str | Path, use_ema: bool = True) -> Arrays:
    """Return the predictor's weights in the checkpoint ``path``, float32 if they were of lower precision.

    path: a checkpoint folder of either framework (``iter_0001000``), a ``.pt`` as facebookresearch/DiT writes or
    publishes it, a ``.safetensors``, or a MindSpore ``.ckpt``. ``use_ema`` prefers the EMA if the file holds both.
    Projectors to a teacher's features are left out.
    """
    return without_projectors(_read(Path(path), use_ema))


def _read(path: Path, use_ema: bool) -> Arrays:
    if (path / "state.ckpt").is_file() or path.suffix == ".ckpt":
        return _read_ckpt(path, use_ema)
    if path.is_dir():
        return _read_dcp(path, use_ema)
    if path.suffix == ".safetensors":
        return safetensors.read(path).weights
    if path.suffix in (".pt", ".pth", ".bin"):
        return preferred(pt.read(path).trees, use_ema)
    raise CheckpointError(
        str(path),
        f"has the unknown ending {path.suffix!r}",
        "give a checkpoint folder, a .pt, .safetensors or .ckpt file",
    )


def preferred(trees: Mapping[str, Arrays], use_ema: bool) -> Arrays:
    """Return the EMA or the weights, as is preferred, or whichever there is."""
    return next(trees[name] for name in (("ema", "model") if use_ema else ("model", "ema")) if name in trees)


def read_trees(path: Path, trees: Sequence[str]) -> dict[str, Arrays]:
    """Return trees (e.g. "power_ema_1") of a checkpoint folder of either framework; check it for damage once."""
    if (path / "state.ckpt").is_file():
        from mindspeed_mm_dit.checkpoint import mindspore_ckpt

        check_whole(path, mindspore_ckpt.problem_of)
        content = mindspore_ckpt.read(path)
        return {tree: _below(tree, content) for tree in trees}
    torch_dcp = reader_of_pytorch_folder(path)
    check_whole(path, torch_dcp.problem_of)
    return {tree: {name: _array(value) for name, value in torch_dcp.read_tree(path, tree).items()} for tree in trees}


def _read_ckpt(path: Path, use_ema: bool) -> Arrays:
    from mindspeed_mm_dit.checkpoint import mindspore_ckpt

    if path.is_dir():
        check_whole(path, mindspore_ckpt.problem_of)
    content = mindspore_ckpt.read(path)
    if not any(name.startswith("model.") for name in content):
        return content
    return (_below("ema", content) if use_ema else {}) or _below("model", content)


def _below(tree: str, content: Mapping[str, np.ndarray]) -> Arrays:
    """Return the arrays of one tree of a checkpoint; their names lose that of the tree."""
    return {name[len(tree) + 1 :]: array for name, array in content.items() if name.startswith(f"{tree}.")}


def _read_dcp(path: Path, use_ema: bool) -> Arrays:
    torch_dcp = reader_of_pytorch_folder(path)
    check_whole(path, torch_dcp.problem_of)
    names = {name.split(".")[0] for name in torch_dcp.shapes(path)}
    prefix = "ema" if use_ema and "ema" in names else "model"
    return {name: _array(value) for name, value in torch_dcp.read_tree(path, prefix).items()}


def _array(tensor: Any) -> np.ndarray:
    """Return a torch tensor as an array; low-precision floats become float32."""
    low = tensor.is_floating_point() and tensor.dtype.itemsize < 4
    return (tensor.float() if low else tensor).numpy(force=True)
