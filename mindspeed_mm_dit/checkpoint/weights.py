"""Read a predictor's weights from a checkpoint of any known format, as arrays by their published names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from mindspeed_mm_dit.checkpoint.compatibility import check_whole
from mindspeed_mm_dit.checkpoint.published import plain, trees_of, without_projectors
from mindspeed_mm_dit.errors import CheckpointError, PlatformError
from mindspeed_mm_dit.framework.safetensors_file import read_safetensors_file
from mindspeed_mm_dit.framework.torch_file import read_torch_file

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
        return read_safetensors_file(path)[0]
    if path.suffix in (".pt", ".pth", ".bin"):
        return choose_tree(read_torch_file(path), use_ema, path)
    raise CheckpointError(
        str(path),
        f"has the unknown ending {path.suffix!r}",
        "give a checkpoint folder, a .pt, .safetensors or .ckpt file",
    )


def choose_tree(content: Mapping[str, Any], use_ema: bool, path: Path) -> Arrays:
    """Pick the weights out of a training checkpoint {"model", "ema", "opt", "args"} or a bare state dict."""
    trees = trees_of(content)
    for key in ("ema", "model") if use_ema else ("model", "ema"):
        if key in trees:
            return trees[key]
    if content and all(isinstance(value, np.ndarray) for value in content.values()):
        return plain(content)
    raise CheckpointError(str(path), f"holds no weights; its keys are: {', '.join(map(str, list(content)[:8]))}")


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


def reader_of_pytorch_folder(path: Path) -> ModuleType:
    """Return the module that reads the checkpoint folder ``path``.

    Raises:
        CheckpointError: it is no checkpoint.
        PlatformError: PyTorch, which wrote it, is not installed here.
    """
    if not (path / ".metadata").is_file():
        raise CheckpointError(
            str(path), "is a folder and no checkpoint: it has neither PyTorch's .metadata nor MindSpore's state.ckpt",
            "name a folder such as checkpoints/iter_0001000, or the one that holds them",
        )  # fmt: skip
    try:
        from mindspeed_mm_dit.checkpoint import torch_dcp
    except ImportError as error:
        raise PlatformError(
            str(path), f"was written by PyTorch, without which it cannot be read ({error})",
            f"in an environment with PyTorch: mm-dit convert {path} NEW_FOLDER --to mindspore (or any file format)",
        ) from None  # fmt: skip
    return torch_dcp


def _array(tensor: Any) -> np.ndarray:
    """Return a torch tensor as an array; low-precision floats become float32."""
    low = tensor.is_floating_point() and tensor.dtype.itemsize < 4
    return (tensor.float() if low else tensor).numpy(force=True)
