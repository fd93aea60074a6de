"""GGUF files, whose tensors are each of a type of few bits; read through the package ``gguf``, and not written.

Tensors have the names that a network's authors gave them, as ComfyUI-GGUF and stable-diffusion.cpp write them. The type
of each tensor counts, and not that of the file: rows that no block fits are stored in another one.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit.checkpoint.formats import Format, StorageSupport
from mindspeed_mm_dit.checkpoint.state import State
from mindspeed_mm_dit.configs.files import UnusableFile, check_file, error_text
from mindspeed_mm_dit.errors import CheckpointError, ConfigError, PlatformError
from mindspeed_mm_dit.framework.low_bit import FORMATS, LowBitWeight
from mindspeed_mm_dit.integrations.formats.quantized import as_array, notes_on
from mindspeed_mm_dit.integrations.formats.single_files import network_tensor_names, plain, recognised

_PLAIN = ("F32", "F16")
_SHAPE = "comfy.gguf.orig_shape."
"""Key before the name of a tensor that has more axes than GGUF allows, or a row that no block fits."""
_SCALES = {"q4_1": (0, 2), "q5_1": (0, 2), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,)}
"""Bytes of a block at which its float16 scales are, where it is not the first alone."""


def read_gguf(path: Path) -> State:
    """Read a file; tensors of few bits stay as they are stored.

    Raises:
        CheckpointError: it cannot be read, a tensor is of a type that is not read, or has scales that are no numbers.
        PlatformError: the package gguf is not installed.
    """
    reader = _open(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    stored: dict[str, LowBitWeight] = {}
    arrays: dict[str, Any] = {}
    for name in network_tensor_names(tensors):
        tensor, what = tensors[name], f"{path}: {name}"
        kind, shape = tensor.tensor_type.name, _shape_of(reader, tensor, what)
        if kind in _PLAIN:
            arrays[name] = np.require(tensor.data.reshape(shape), requirements="A")
        elif kind.lower() in FORMATS:
            stored[name] = _stored(kind.lower(), shape, tensor.data, what)
        else:
            raise CheckpointError(
                f"{what} is of type {kind}, which is not read here. Use a file in Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, "
                "Q5_K, Q6_K or BF16."
            )
    arrays |= {name: as_array(weight) for name, weight in stored.items()}
    return recognised(State({"model": plain(arrays, path)}, notes=notes_on(stored)))


def _open(path: Path) -> Any:
    """Return the package's reader of a file."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise PlatformError(
            f"{path} is read with the package gguf, which cannot be used here: {error}. Install it with pip install "
            "gguf, or use a .safetensors file."
        ) from None

    class Reader(GGUFReader):  # type: ignore[misc, unused-ignore]
        """A reader that does not go on behind the end of the file."""

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            size = int(offset) + int(count) * np.dtype(dtype).itemsize
            if size > len(self.data):
                raise ValueError("it is cut short")
            return super()._get(offset, dtype, count, override_order)

    try:
        check_file(path)
        reader = Reader(path, "c")  # (PyTorch warns of arrays that cannot be written)
        if reader.byte_order != "I":
            raise ValueError("its numbers are in the byte order of other machines")
    except UnusableFile as problem:
        raise CheckpointError(f"{path} {problem}. Copy or download it again.") from None
    except Exception as error:  # (damaged files can raise anything)
        raise CheckpointError(f"{path} cannot be read: {error_text(error)}. Copy or download it again.") from None
    return reader


def _shape_of(reader: Any, tensor: Any, what: str) -> tuple[int, ...]:
    """Return the shape of a tensor as in PyTorch; GGUF names the last axis first."""
    shape = tuple(int(side) for side in tensor.shape[::-1])
    if (field := reader.get_field(f"{_SHAPE}{tensor.name}")) is not None:
        original = tuple(field.contents())
        if not all(isinstance(side, int) and side > 0 for side in original) or math.prod(original) != math.prod(shape):
            raise CheckpointError(f"{what} is of shape {shape} and not of {original}. Copy or download the file again.")
        return original
    return shape


def _stored(kind: str, shape: tuple[int, ...], data: np.ndarray, what: str) -> LowBitWeight:
    """Return a tensor of few bits; raises CheckpointError if one of its scales is no finite number."""
    size = FORMATS[kind].bytes_of_block
    codes = data.reshape(shape[0], -1) if len(shape) == 2 else data.reshape(-1)
    if size:
        blocks = data.reshape(-1, size)
        for at in _SCALES.get(kind, (0,)):
            scales = np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)
            if not np.isfinite(scales).all():
                raise CheckpointError(f"{what} has scales that are no finite numbers. Copy or download the file again.")
    else:
        codes = data.reshape(-1)
    return LowBitWeight(kind, shape, {"codes": codes})


def _refuse_to_write(path: Path, state: State) -> None:
    raise ConfigError("TARGET is a GGUF file, which is read, and not written. Write a .safetensors with --dtype nf4.")


GGUF = Format(
    lambda path: path.is_file() and path.suffix == ".gguf",
    read_gguf,
    _refuse_to_write,
    StorageSupport.ONE_TREE,
    (".gguf",),
)
