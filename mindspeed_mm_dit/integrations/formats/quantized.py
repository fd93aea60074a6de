"""Weights that a file stores in float8 or int8, each to be multiplied by a scale and perhaps rotated back.

The format of a layer is named by its tensor ``comfy_quant`` or in the header (ComfyUI); float8 also shows in the dtype.
Every other format is refused by the names of the layer and the format.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from mindspeed_mm_dit.checkpoint.state import Arrays, check_are_floats
from mindspeed_mm_dit.configs.limits import shorten_repr
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.framework.safetensors_file import widen

Formats = dict[str, dict[str, Any]]
"""By layer: the object that ComfyUI writes about it, {"format": "int8_tensorwise"} and the like."""

METADATA_KEY = "comfy_quant"
_HEADER = "_quantization_metadata"
_SCALES = ("scale_weight", "weight_scale", "weight_scale_inv")
"""Names of the scale of a ``weight``, in ComfyUI's files, later ones of it and FLUX.2, and by blocks of it."""
_FOR_ARITHMETIC = ("scale_input", "input_scale", "scaled_fp8", METADATA_KEY)
"""Tensors that say nothing about weights but what ``Formats`` hold: they are for arithmetic in float8 or int8."""
_FLOAT8 = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
_LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
_DTYPES = {
    "float8_e4m3fn": ("F8_E4M3", "U8"),
    "float8_e5m2": ("F8_E5M2", "U8"),
    "int8_tensorwise": ("I8",),
    "int8_rowwise": ("I8",),
}
"""Formats that are read -> dtypes that their weights have in a file."""
_FEW_BITS = {dtype for dtypes in _DTYPES.values() for dtype in dtypes}
_WITHOUT_EFFECT = {"format", "orig_dtype", "orig_shape", "per_row", "full_precision_matrix_mult", "convrot_groupsize"}
_OTHERS = {
    "weight_scale_2": "nvfp4",
    "_weight_qdata": "torchao's format",
    "SCB": "int8 of bitsandbytes",
    "qweight": "packed integers (GPTQ, AWQ or SVDQuant)",
    "weight_packed": "packed integers (compressed-tensors)",
    "bitsandbytes__nf4": "nf4 of bitsandbytes",
    "bitsandbytes__fp4": "fp4 of bitsandbytes",
}
"""Last parts of the names of tensors that only weights in another format have."""
_NETWORK = "model.diffusion_model."
"""Prefix of a network's tensors in whole checkpoints, which ComfyUI leaves out in headers."""
_BLOCK = 128
_ROTATION = np.array([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], np.float32) / 2
"""ConvRot's matrix for groups of 4; larger groups have its Kronecker powers. Each is its own inverse."""
_MAX_GROUP = 4096


def read_formats(marks: Mapping[str, np.ndarray], metadata: Mapping[str, str], what: str) -> Formats:
    """Return the formats that ComfyUI names in a file's ``comfy_quant`` tensors and in its header.

    Raises CheckpointError, naming the layer, for a format that is not read.
    """
    formats = {}
    if _HEADER in metadata:
        layers = _parsed(metadata[_HEADER], f"{what}: {_HEADER}").get("layers")
        formats = layers if isinstance(layers, dict) else {}
    for name, array in marks.items():
        if name.rpartition(".")[2] == METADATA_KEY:
            formats[name.rpartition(".")[0]] = _parsed(array.astype(np.uint8).tobytes(), f"{what}: {name}")
    for layer, entry in formats.items():
        stored_as = entry.get("format") if isinstance(entry, dict) else None
        if not isinstance(stored_as, str) or stored_as not in _DTYPES:
            raise _refused(f"{what}: {layer} is stored in format {shorten_repr(stored_as)}, which is not read here.")
        for key in entry.keys() - _WITHOUT_EFFECT - {"convrot"}:
            raise _refused(f"{what}: {layer} is stored in {stored_as} with {shorten_repr(key)}, which is unknown here.")
    return formats


def _parsed(text: str | bytes, what: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise CheckpointError(f"{what} does not hold a JSON object. Copy or download the file again.")
    return content


class Quantized(NamedTuple):
    """A weight as a file stores it."""

    codes: np.ndarray
    """Integers, or numbers of float8 as float32, of the weight's shape."""
    format: str
    """A key of ``_DTYPES``."""
    scale: np.ndarray | None
    """Multiplies the codes, as a form that broadcasts with them; None: they are the weight."""
    rotation: int = 0
    """Inputs that were rotated together (ConvRot); 0: none."""

    @property
    def kind(self) -> str:
        """Return "float8" or "int8"."""
        return self.format.partition("_")[0]

    def numbers(self) -> np.ndarray:
        """Return the weight, float32."""
        weight = self.codes if self.scale is None else self.codes * self.scale
        if self.rotation:
            weight = (weight.reshape(-1, self.rotation) @ _rotation(self.rotation)).reshape(weight.shape)
        return weight


def dequantized(
    arrays: Arrays, dtypes: Mapping[str, str], formats: Formats, what: str
) -> tuple[Arrays, tuple[str, ...]]:
    """Return the weights of a file as numbers, without their scales, and a note if any were stored in few bits.

    Arguments and errors are those of :func:`read_quantized`.
    """
    stored, quantized = read_quantized(arrays, dtypes, formats, what)
    weights = {name: quantized[name].numbers() if name in quantized else stored[name] for name in stored}
    counts = Counter(tensor.kind for tensor in quantized.values() if tensor.codes.size)
    counts_text = " and ".join(f"{count} tensors are stored in {name}" for name, count in sorted(counts.items()))
    times = ", times their scales" if any(tensor.scale is not None for tensor in quantized.values()) else ""
    return weights, (f"{counts_text}{times}; the computation has the precision of the run",) if counts_text else ()


def read_quantized(
    arrays: Arrays, dtypes: Mapping[str, str], formats: Formats, what: str
) -> tuple[Arrays, dict[str, Quantized]]:
    """Return the weights of a file as they are stored, without scales, and by name those that are quantized.

    dtypes: how each tensor is stored, by safetensors' name. Raises CheckpointError, naming the layer, for a format that
    is not read and for a scale that is missing or does not fit.
    """
    for name in arrays:
        prefix, _, last = name.rpartition(".")
        if last in _OTHERS:
            layer = prefix.removesuffix(".weight.quant_state")
            raise _refused(f"{what}: {layer} is stored in {_OTHERS[last]}, which is not read here.")
    if not formats and not set(dtypes.values()) & _FEW_BITS:
        check_are_floats(arrays, what)
        return arrays, {}
    last_parts = {name: name.rpartition(".")[2] for name in arrays}
    weights = {name: arrays[name] for name, last in last_parts.items() if last not in (*_SCALES, *_FOR_ARITHMETIC)}
    scales = {name.rpartition(".")[0]: arrays[name] for name, last in last_parts.items() if last in _SCALES}
    formats = {layer if f"{layer}.weight" in weights else f"{_NETWORK}{layer}": formats[layer] for layer in formats}
    for layer in sorted(scales.keys() | formats.keys()):
        if f"{layer}.weight" not in weights:
            raise _refused(f"{what}: {layer} has a scale or a format, and no weight.")
    quantized = {}
    for name in weights:
        layer, dtype = name.removesuffix(".weight"), dtypes.get(name, str(arrays[name].dtype))
        known = layer if layer != name else ""
        tensor = _quantized(arrays[name], dtype, formats.get(known, {}), scales.get(known), f"{what}: {layer}")
        if tensor is not None:
            quantized[name] = tensor
            if tensor.scale is None and tensor.codes.ndim > 1 and (len(weights) < len(arrays) or _needs_scale(tensor)):
                raise _refused(f"{what}: {name} is stored in {tensor.kind}, and its scale is missing.")
    check_are_floats({name: array for name, array in weights.items() if name not in quantized}, what)
    return weights, quantized


def _quantized(
    array: np.ndarray, dtype: str, entry: Mapping[str, Any], scale: np.ndarray | None, what: str
) -> Quantized | None:
    """Return a tensor as it is stored, or None if it is not quantized."""
    name = entry.get("format") or _FLOAT8.get(dtype)
    if name is None and scale is None:
        return None
    if name is None:
        raise _refused(f"{what} is stored as {dtype} with a scale, and the file does not name its format.")
    if dtype not in _DTYPES[name]:
        raise _refused(f"{what} is stored as {dtype}, and the file says that its format is {name}.")
    codes = widen(array, name) if dtype == "U8" else array
    rotation = entry.get("convrot_groupsize", 256) if entry.get("convrot") else 0
    if rotation and not _fits_rotation(rotation, codes.shape):
        raise _refused(
            f"{what} is rotated in groups of {shorten_repr(rotation)}, which do not fit its shape {codes.shape}."
        )
    return Quantized(codes, name, None if scale is None else _fitted(scale, codes.shape, what), rotation)


def _fits_rotation(size: Any, shape: tuple[int, ...]) -> bool:
    return type(size) is int and len(_rotation(size)) == size and len(shape) == 2 and shape[1] % size == 0


def _needs_scale(tensor: Quantized) -> bool:
    """Return whether codes cannot be the weight itself: integers, and float8 that fills more than half its range."""
    return bool(tensor.codes.size and np.abs(tensor.codes).max() > _LARGEST.get(tensor.format, 0) / 2)


def _refused(problem: str) -> CheckpointError:
    return CheckpointError(f"{problem} Use a file in bfloat16, or in ComfyUI's float8 or int8.")


def _rotation(size: int) -> np.ndarray:
    """Return ConvRot's matrix (n, n) for groups of ``size``; n is the next power of 4 if that is none."""
    rotation = np.ones((1, 1), np.float32)
    while len(rotation) < min(size, _MAX_GROUP):
        rotation = np.kron(rotation, _ROTATION)
    return rotation


def _fitted(scale: np.ndarray, shape: tuple[int, ...], what: str) -> np.ndarray:
    """Return a scale of a whole weight, of its rows, or of blocks of it in a form that multiplies it."""
    scale = scale.astype(np.float32)
    if scale.size == 1:
        return scale.reshape(())
    if len(shape) == 2 and scale.shape == tuple(-(-side // _BLOCK) for side in shape):
        return scale.repeat(_BLOCK, 0)[: shape[0]].repeat(_BLOCK, 1)[:, : shape[1]]
    if shape and scale.size == shape[0]:
        return scale.reshape(shape[0], *(1 for _ in shape[1:]))
    raise CheckpointError(f"{what} has a scale of shape {scale.shape} for a weight of {shape}. Copy the file again.")
