"""Weights stored in float8: as they are, or each to be multiplied by a scale that is stored beside it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mindspeed_mm_dit.errors import CheckpointError

Arrays = dict[str, np.ndarray]
_SCALES = ("scale_weight", "weight_scale", "weight_scale_inv")
"""Names of the scale of a ``weight``, in ComfyUI's files, later ones of it and FLUX.2, and by blocks of it."""
_OF_ARITHMETIC = ("scale_input", "input_scale", "comfy_quant", "scaled_fp8")
"""What is beside weights only for arithmetic in float8, or to say that they are scaled."""
_LARGEST = {"F8_E4M3": 448.0, "F8_E5M2": 57344.0}
_BLOCK = 128


def unscaled(arrays: Arrays, kinds: Mapping[str, str], what: str) -> tuple[Arrays, tuple[str, ...]]:
    """Return the weights of a file multiplied by their scales, without these, and a note if any were in float8.

    kinds: how each is stored, by safetensors' name. Raises CheckpointError, naming the tensor, for a scale that is
    missing or does not fit.
    """
    low = {name for name, kind in kinds.items() if kind in _LARGEST and arrays[name].size}
    if not low:
        return arrays, ()
    beside = {
        name: name.rpartition(".")[2] for name in arrays if name.rpartition(".")[2] in (*_SCALES, *_OF_ARITHMETIC)
    }
    found = {name: array for name, array in arrays.items() if name not in beside}
    for name in sorted(low & found.keys()):
        stem = name.removesuffix(".weight")
        scale = next((arrays[f"{stem}.{own}"] for own in _SCALES if f"{stem}.{own}" in arrays), None)
        if scale is not None:
            found[name] = found[name] * _fitted(scale, found[name].shape, f"{what}: {stem}")
        elif found[name].ndim > 1 and (beside or np.abs(found[name]).max() > _LARGEST[kinds[name]] / 2):
            raise CheckpointError(
                f"{what}: {name}",
                "is in float8, and its scale is missing",
                "copy the file again, or use one in bfloat16",
            )
    times = ", times their scales" if beside else ""
    return found, (f"{len(low)} tensors are stored in float8{times}: no computation is in float8, but as the run says",)


def _fitted(scale: np.ndarray, shape: tuple[int, ...], what: str) -> np.ndarray:
    """Return a scale of a whole weight, of its rows, or of blocks of it in a form that multiplies it."""
    scale = scale.astype(np.float32)
    if scale.size == 1:
        return scale.reshape(())
    if len(shape) == 2 and scale.shape == tuple(-(-side // _BLOCK) for side in shape):
        return scale.repeat(_BLOCK, 0)[: shape[0]].repeat(_BLOCK, 1)[:, : shape[1]]
    if scale.size == shape[0]:
        return scale.reshape(shape[0], *(1 for _ in shape[1:]))
    raise CheckpointError(what, f"has a scale of shape {scale.shape} for a weight of {shape}", "copy the file again")
