"""Weights that a file stores in few bits, kept as they are stored: :class:`StoredArray` widens them when they are used.

- ComfyUI: float8 and int8 with scales, named by a layer's tensor ``comfy_quant`` or in the header
- bitsandbytes: nf4, named by a layer's ``weight.quant_state.bitsandbytes__nf4``
- torchao: int8 and float8 under ``_weight_qdata``
- bfloat16 and float8, which need no name

Every other format is refused by the names of the layer and the format.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from mindspeed_mm_dit.checkpoint.state import Arrays, check_are_floats
from mindspeed_mm_dit.configs.limits import shorten_repr
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.framework.low_bit import BLOCK, NF4, LowBitWeight, StoredArray, rotation_matrix
from mindspeed_mm_dit.framework.safetensors_file import widen

Formats = dict[str, dict[str, Any]]
"""By layer: the object that ComfyUI writes about it, {"format": "int8_tensorwise"} and the like; by the name of a
weight: the one that torchao writes."""
Tensor = tuple[str, np.ndarray]
"""Dtype of a tensor in a file, by safetensors' name, and its numbers: the bits of bfloat16 and float8."""

METADATA_KEY = "comfy_quant"
_HEADER = "_quantization_metadata"
_SCALES = ("scale_weight", "weight_scale", "weight_scale_inv")
"""Names of the scale of a ``weight``, in ComfyUI's files, later ones of it and FLUX.2, and by blocks of it."""
_FOR_ARITHMETIC = ("scale_input", "input_scale", "scaled_fp8", METADATA_KEY)
"""Tensors that say nothing about weights but what ``Formats`` hold: they are for arithmetic in float8 or int8."""
_LOW = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
_LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
_DTYPES = {
    "float8_e4m3fn": ("F8_E4M3", "U8"),
    "float8_e5m2": ("F8_E5M2", "U8"),
    "int8_tensorwise": ("I8",),
    "int8_rowwise": ("I8",),
}
"""Formats of ComfyUI that are read -> dtypes that their weights have in a file."""
_WITHOUT_EFFECT = {"format", "orig_dtype", "orig_shape", "per_row", "full_precision_matrix_mult", "convrot_groupsize"}
_NF4, _FP4 = (f".quant_state.bitsandbytes__{kind}4" for kind in ("nf", "fp"))
_OF_NF4 = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
"""What follows the name of a weight in nf4 in the names of its other tensors."""
_BLOCKS = [2**power for power in range(5, 13)]
"""Sizes of blocks that bitsandbytes knows."""
_TORCHAO, _DATA = "_weight_", "_weight_qdata"
_TORCHAO_TYPES = {"Int8Tensor": ("I8",), "Float8Tensor": ("F8_E4M3", "F8_E5M2")}
_OTHERS = {
    "weight_scale_2": "nvfp4",
    "SCB": "int8 of bitsandbytes",
    "qweight": "packed integers (GPTQ, AWQ or SVDQuant)",
    "weight_packed": "packed integers (compressed-tensors)",
}
"""Last parts of the names of tensors that only weights in another format have."""
_NETWORK = "model.diffusion_model."
"""Prefix of a network's tensors in whole checkpoints, which ComfyUI leaves out in headers."""
_SQUARE = 128
"""Rows and columns of a weight that share a scale of ``weight_scale_inv``."""
_MAX_GROUP = 4096
_NAMES = {"fp8": "float8"}


def read_formats(marks: Mapping[str, np.ndarray], metadata: Mapping[str, str], what: str) -> Formats:
    """Return the formats that ComfyUI names in a file's ``comfy_quant`` tensors and in its header, and torchao there.

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
            raise refused(f"{what}: {layer} is stored in format {shorten_repr(stored_as)}, which is not read here.")
        for key in entry.keys() - _WITHOUT_EFFECT - {"convrot"}:
            raise refused(f"{what}: {layer} is stored in {stored_as} with {shorten_repr(key)}, which is unknown here.")
    if "tensor_names" in metadata:
        for name in (name for name in metadata if name.endswith("weight")):
            kind = _parsed(metadata[name], f"{what}: {name} in the header").get("_type")
            if kind != "Tensor" and kind not in _TORCHAO_TYPES:
                layer = name.removesuffix(".weight")
                raise refused(f"{what}: {layer} is stored in {shorten_repr(kind)} of torchao, which is not read here.")
    return formats


def _parsed(text: str | bytes, what: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise CheckpointError(f"{what} does not hold a JSON object. Copy or download the file again.")
    return content


def read_quantized(
    arrays: Arrays, dtypes: Mapping[str, str], formats: Formats, what: str
) -> tuple[Arrays, tuple[str, ...]]:
    """Return the weights of a file, matrices of few bits as they are stored, and a note if any are quantised.

    arrays: the bits of bfloat16 and float8, and other numbers. dtypes: how each is stored, by safetensors' name. Raises
    CheckpointError, naming the layer, for a format that is not read and for parts that are missing or do not fit.
    """
    tensors = {name: (dtypes.get(name, str(array.dtype)), array) for name, array in arrays.items()}
    for name in tensors:
        prefix, _, last = name.rpartition(".")
        kind = "fp4 of bitsandbytes" if name.endswith(_FP4) else _OTHERS.get(last)
        if kind is None and last.startswith(_TORCHAO) and last not in _PARTS_OF_TORCHAO:
            kind = f"a format of torchao with {last}"
        if kind is not None:
            layer = prefix.removesuffix(".weight.quant_state")
            raise refused(f"{what}: {layer} is stored in {kind}, which is not read here.")
    stored: dict[str, LowBitWeight] = {}
    tensors = _take_nf4(tensors, stored, what)
    tensors = _take_torchao(tensors, stored, what)
    tensors = _take_scaled(tensors, stored, formats, what)
    plain = {name: _plain(tensor) for name, tensor in tensors.items()}
    check_are_floats(plain, what)
    return plain | {name: as_array(weight) for name, weight in stored.items()}, notes_on(stored)


def as_array(weight: LowBitWeight) -> Any:
    """Return a weight as an array: as it is stored, or, if it is a vector, as float32."""
    return StoredArray(weight) if len(weight.shape) > 1 else weight.widened()


def notes_on(stored: Mapping[str, LowBitWeight]) -> tuple[str, ...]:
    """Return a note for the user on the weights of a file that are quantised; none if there are none."""
    kinds = (_NAMES.get(weight.format, weight.format) for weight in stored.values() if math.prod(weight.shape))
    counts = Counter(kinds)
    counts_text = " and ".join(f"{count} tensors are stored in {name}" for name, count in sorted(counts.items()))
    times = ", times their scales" if any(len(weight.parts) > 1 for weight in stored.values()) else ""
    return (f"{counts_text}{times}; the computation has the precision of the run",) if counts_text else ()


def _plain(tensor: Tensor) -> Any:
    """Return a tensor that is not quantised: bfloat16 as it is stored if it is a matrix, else float32."""
    dtype, array = tensor
    if dtype != "BF16":
        return array
    if array.ndim != 2:
        return widen(array, "bfloat16")
    return StoredArray(LowBitWeight("bf16", array.shape, {"codes": _bytes(array)}))


def _bytes(array: np.ndarray) -> np.ndarray:
    """Return the bytes of an array, (n,) uint8, of a file without copying them."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _numbers(tensor: Tensor, what: str) -> np.ndarray:
    """Return a tensor of scales as float32; raises CheckpointError if one is no finite number."""
    dtype, array = tensor
    numbers = widen(array, _LOW[dtype]) if dtype in _LOW else array.astype(np.float32)
    if not np.isfinite(numbers).all():
        raise _damaged(f"{what} has scales that are no finite numbers.")
    return numbers


def refused(problem: str) -> CheckpointError:
    """Return the error for a format that is not read."""
    return CheckpointError(
        f"{problem} Use a file in bfloat16, in ComfyUI's float8 or int8, in nf4 of bitsandbytes, in int8 or float8 of "
        "torchao, or of GGUF."
    )


def _damaged(problem: str) -> CheckpointError:
    return CheckpointError(f"{problem} Copy or download the file again.")


# --- bitsandbytes -----------------------------------------------------------------------------------------------------


def _take_nf4(tensors: dict[str, Tensor], stored: dict[str, LowBitWeight], what: str) -> dict[str, Tensor]:
    """Move the weights in nf4 from ``tensors`` to ``stored``; return the tensors that remain."""
    names = [name.removesuffix(_NF4) for name in tensors if name.endswith(_NF4)]
    used = set()
    for name in names:
        parts = {part: tensors.get(f"{name}.{part}") for part in _OF_NF4}
        state = _parsed(_bytes(tensors[f"{name}{_NF4}"][1]).tobytes(), f"{what}: {name}{_NF4} of nf4")
        layer = f"{what}: {name.removesuffix('.weight')}"
        stored[name] = _nf4(tensors.get(name), parts, state, f"{layer} is stored in nf4 of bitsandbytes, and")
        used |= {name, f"{name}{_NF4}", *(f"{name}.{part}" for part in _OF_NF4)}
    remaining = {name: tensor for name, tensor in tensors.items() if name not in used}
    for name in remaining:
        if name.rpartition(".")[2] in _OF_NF4:
            raise _damaged(f"{what}: {name} belongs to a weight of bitsandbytes whose quant_state is missing.")
    return remaining


def _nf4(codes: Tensor | None, parts: Mapping[str, Tensor | None], state: dict[str, Any], what: str) -> LowBitWeight:
    """Return a weight from its tensors and the object in its ``quant_state``."""
    shape, block, nested_block = (cast(Any, state.get(key)) for key in ("shape", "blocksize", "nested_blocksize"))
    if state.get("quant_type") != "nf4" or not isinstance(shape, list) or not shape:
        raise _damaged(f"{what} its quant_state does not say so, or has no shape.")
    if not all(type(side) is int and side > 0 for side in shape):
        raise _damaged(f"{what} its quant_state has the shape {shorten_repr(shape)}.")
    for size in (block, *([] if nested_block is None else [nested_block])):
        if type(size) is not int or size not in _BLOCKS:
            raise _damaged(f"{what} its quant_state has blocks of {shorten_repr(size)}.")
    needed = _OF_NF4 if nested_block is not None else _OF_NF4[:2]
    if codes is None or any(parts[part] is None for part in needed):
        missing = "weight" if codes is None else next(part for part in needed if parts[part] is None)
        raise _damaged(f"{what} its {missing} is missing.")
    numbers = math.prod(shape)
    blocks = -(-numbers // block)
    sizes = {"absmax": blocks, "quant_map": len(NF4), "nested_quant_map": 256}
    sizes["nested_absmax"] = -(-blocks // (nested_block or 1))
    found: dict[str, np.ndarray] = {"codes": _bytes(codes[1])}
    if len(found["codes"]) != -(-numbers // 2):
        raise _damaged(f"{what} its {len(found['codes'])} bytes are not those of {tuple(shape)}.")
    for part in needed:
        tensor = parts[part]
        assert tensor is not None
        if tensor[1].size != sizes[part]:
            raise _damaged(f"{what} its {part} has {tensor[1].size} numbers, not {sizes[part]}.")
        is_codes = part == "absmax" and nested_block is not None
        if is_codes and tensor[0] != "U8":
            raise _damaged(f"{what} its absmax is in {tensor[0]}, not in U8.")
        found[part] = (tensor[1] if is_codes else _numbers(tensor, f"{what} its {part}")).reshape(-1)
    found["table"] = found.pop("quant_map")
    options: dict[str, Any] = {"block": block}
    if nested_block is not None:
        found["nested_map"] = found.pop("nested_quant_map")
        offset: Any = state.get("nested_offset")
        if type(offset) not in (int, float) or not math.isfinite(offset):
            raise _damaged(f"{what} its quant_state has nested_offset = {shorten_repr(offset)}.")
        options |= {"nested_block": nested_block, "offset": float(np.float32(offset))}
    return LowBitWeight("nf4", tuple(shape), found, tuple(options.items()))


def nf4_tensors(name: str, weight: LowBitWeight) -> Arrays:
    """Return the tensors in which bitsandbytes stores a weight in nf4, by their names in a file."""
    options, parts = dict(weight.options), weight.parts
    state = {"quant_type": "nf4", "blocksize": options.get("block", BLOCK), "dtype": "float32", "shape": weight.shape}
    arrays = {
        name: parts["codes"].reshape(-1, 1),
        f"{name}.absmax": parts["absmax"],
        f"{name}.quant_map": parts["table"],
    }
    if "nested_block" in options:
        arrays |= {f"{name}.nested_absmax": parts["nested_absmax"], f"{name}.nested_quant_map": parts["nested_map"]}
        state |= {"nested_blocksize": options["nested_block"], "nested_dtype": "float32"}
        state["nested_offset"] = options["offset"]
    return arrays | {f"{name}{_NF4}": _json_bytes(state)}


def _json_bytes(content: Mapping[str, Any]) -> np.ndarray:
    return np.frombuffer(json.dumps(content).encode(), np.uint8)


# --- torchao ----------------------------------------------------------------------------------------------------------

_PARTS_OF_TORCHAO = (_DATA, "_weight_scale", "_weight_zero_point")


def _take_torchao(tensors: dict[str, Tensor], stored: dict[str, LowBitWeight], what: str) -> dict[str, Tensor]:
    """Move the weights in torchao's int8 and float8 from ``tensors`` to ``stored``; return the tensors that remain."""
    remaining = {name: t for name, t in tensors.items() if name.rpartition(".")[2] not in _PARTS_OF_TORCHAO}
    for prefix in dict.fromkeys(name[: name.rindex(_TORCHAO)] for name in tensors if name not in remaining):
        layer = f"{what}: {prefix.rstrip('.')} is stored in torchao's format, and"
        data, scale = tensors.get(f"{prefix}{_DATA}"), tensors.get(f"{prefix}_weight_scale")
        if data is None or scale is None:
            raise _damaged(f"{layer} its data or its scale is missing.")
        dtype, codes = data
        if dtype != "I8" and dtype not in _TORCHAO_TYPES["Float8Tensor"]:
            raise refused(f"{layer} its data is in {dtype}, which is not read here.")
        parts, options = {"codes": codes}, {"dtype": _LOW[dtype]} if dtype in _LOW else dict[str, Any]()
        parts["scale"], square = _fitted(_numbers(scale, layer), codes.shape, layer)
        options |= {"square": square} if square else {}
        if (zero := tensors.get(f"{prefix}_weight_zero_point")) is not None:
            points = _numbers(zero, layer)
            if points.any():
                parts["zero"] = _fitted(points, codes.shape, layer)[0]
        kind = "fp8" if dtype in _LOW else "int8"
        stored[f"{prefix}weight"] = LowBitWeight(kind, codes.shape, parts, tuple(options.items()))
    return remaining


# --- ComfyUI, and float8 alone ----------------------------------------------------------------------------------------


def _take_scaled(
    tensors: dict[str, Tensor], stored: dict[str, LowBitWeight], formats: Formats, what: str
) -> dict[str, Tensor]:
    """Move the weights in float8 and int8 from ``tensors`` to ``stored``; return the tensors that remain."""
    if not formats and not {dtype for dtype, _ in tensors.values()} & {"F8_E4M3", "F8_E5M2", "I8", "U8"}:
        return tensors
    last_parts = {name: name.rpartition(".")[2] for name in tensors}
    weights = {name: tensors[name] for name, last in last_parts.items() if last not in (*_SCALES, *_FOR_ARITHMETIC)}
    scales = {name.rpartition(".")[0]: tensors[name] for name, last in last_parts.items() if last in _SCALES}
    formats = {layer if f"{layer}.weight" in weights else f"{_NETWORK}{layer}": formats[layer] for layer in formats}
    for layer in sorted(scales.keys() | formats.keys()):
        if f"{layer}.weight" not in weights:
            raise refused(f"{what}: {layer} has a scale or a format, and no weight.")
    for name, tensor in weights.items():
        layer = name.removesuffix(".weight")
        known = layer if layer != name else ""
        weight = _scaled(tensor, formats.get(known, {}), scales.get(known), f"{what}: {layer}")
        if weight is not None:
            stored[name] = weight
            has_scale, is_matrix = "scale" in weight.parts, len(weight.shape) > 1
            if not has_scale and is_matrix and (len(weights) < len(tensors) or _needs_scale(weight)):
                kind = _NAMES.get(weight.format, weight.format)
                raise refused(f"{what}: {name} is stored in {kind}, and its scale is missing.")
    return {name: tensor for name, tensor in weights.items() if name not in stored}


def _scaled(tensor: Tensor, entry: Mapping[str, Any], scale: Tensor | None, what: str) -> LowBitWeight | None:
    """Return a tensor as it is stored, or None if it is not quantised."""
    dtype, codes = tensor
    name = entry.get("format") or (_LOW[dtype] if _LOW.get(dtype) in _FLOAT8 else None)
    if name is None and scale is None:
        return None
    if name is None:
        raise refused(f"{what} is stored as {dtype} with a scale, and the file does not name its format.")
    if dtype not in _DTYPES[name]:
        raise refused(f"{what} is stored as {dtype}, and the file says that its format is {name}.")
    parts, options = {"codes": codes}, dict[str, Any]()
    if name in _FLOAT8:
        options["dtype"] = name
    if scale is not None:
        parts["scale"], square = _fitted(_numbers(scale, what), codes.shape, what)
        options |= {"square": square} if square else {}
    rotation = entry.get("convrot_groupsize", 256) if entry.get("convrot") else 0
    if rotation:
        if not _fits_rotation(rotation, codes.shape):
            raise refused(
                f"{what} is rotated in groups of {shorten_repr(rotation)}, which do not fit its shape {codes.shape}."
            )
        options["rotation"] = rotation
    return LowBitWeight("fp8" if name in _FLOAT8 else "int8", codes.shape, parts, tuple(options.items()))


def _fits_rotation(size: Any, shape: tuple[int, ...]) -> bool:
    is_power = type(size) is int and 1 < size <= _MAX_GROUP and len(rotation_matrix(size)) == size
    return is_power and len(shape) == 2 and shape[1] % size == 0


def _needs_scale(weight: LowBitWeight) -> bool:
    """Return whether codes cannot be the weight itself: integers, and float8 that fills more than half its range."""
    codes = weight.parts["codes"]
    if not codes.size:
        return False
    if weight.format == "int8":
        return bool(codes.any())
    name = dict(weight.options)["dtype"]
    largest = widen((codes & np.uint8(0x7F)).max(keepdims=True).reshape(1), name)  # (bits are in the order of numbers)
    return bool(largest[0] > _LARGEST[name] / 2)


def _fitted(scale: np.ndarray, shape: tuple[int, ...], what: str) -> tuple[np.ndarray, int]:
    """Return a scale in a form that multiplies a weight of ``shape``, and 0; or that of squares, and their side."""
    if scale.size == 1:
        return scale.reshape(()), 0
    if len(shape) == 2 and scale.shape == tuple(-(-side // _SQUARE) for side in shape):
        return scale, _SQUARE
    if shape and scale.size == shape[0]:
        return scale.reshape(shape[0], *(1 for _ in shape[1:])), 0
    raise _damaged(f"{what} has a scale of shape {scale.shape} for a weight of {shape}.")


def comfy_tensors(name: str, weight: LowBitWeight) -> dict[str, Tensor]:
    """Return the tensors in which ComfyUI stores a weight in float8 or int8, by their names in a file."""
    layer, options = name.removesuffix(".weight"), dict(weight.options)
    entry: dict[str, Any] = {"format": options.get("dtype", "int8_tensorwise")}
    if "rotation" in options:
        entry |= {"convrot": True, "convrot_groupsize": options["rotation"]}
    dtypes = {kind: dtype for dtype, kind in _LOW.items()}
    tensors: dict[str, Tensor] = {name: (dtypes.get(entry["format"], "I8"), weight.parts["codes"])}
    scale = np.asarray(weight.parts.get("scale", 1), np.float32)
    return tensors | {f"{layer}.weight_scale": ("F32", scale), f"{layer}.{METADATA_KEY}": ("U8", _json_bytes(entry))}
