"""One set of weights as ``.safetensors``; its header holds the facts of the run and diffusers' config."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mindspeed_mm_dit.checkpoint.published import names_of_network, plain
from mindspeed_mm_dit.checkpoint.quantized import MARK, Formats, dequantized, read_formats
from mindspeed_mm_dit.checkpoint.state import Arrays, State
from mindspeed_mm_dit.checkpoint.store import check_facts
from mindspeed_mm_dit.configs.files import read_safetensors_header
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.framework.safetensors_file import read_safetensors_file


def fits(path: Path) -> bool:
    """Return whether ``path`` is a safetensors file, by its ending."""
    return path.is_file() and path.suffix == ".safetensors"


def read(path: Path) -> State:
    """Read a file; bfloat16 and float8, which NumPy lacks, come as float32."""
    stored = read_stored([path], path)
    known = {key: _object(stored.metadata[key], path, key) for key in ("facts", "config") if key in stored.metadata}
    check_facts(known.get("facts", {}), path)
    weights = {"model": plain(stored.arrays, path)}
    return State(weights, is_bfloat16=stored.is_bfloat16, notes=stored.notes, **known)


class Stored(NamedTuple):
    """What files hold, and how."""

    arrays: Arrays
    metadata: dict[str, str]
    is_bfloat16: bool
    notes: tuple[str, ...]


def read_stored(files: Sequence[Path], what: Path, named: Collection[str] = ()) -> Stored:
    """Read weights from one file or several, as float32 if they are of fewer bits, quantised ones times their scales.

    what: names them in errors; if it is an index, ``named`` are the tensors that it says they have. Raises
    CheckpointError for a file that cannot be read, a tensor or a scale that is missing.
    """
    arrays: Arrays = {}
    metadata, dtypes = dict[str, str](), dict[str, str]()
    formats: Formats = {}
    for file in files:
        formats |= read_formats(*read_safetensors_file(file, _format_names), str(file))
        content, header = read_safetensors_file(file, names_of_network)
        arrays, metadata = arrays | content, metadata | header
        dtypes |= {name: entry["dtype"] for name, entry in read_safetensors_header(file).tensors.items()}
    check_named(named, arrays, what)
    weights, notes = dequantized(arrays, dtypes, formats, str(what))
    return Stored(weights, metadata, 2 * list(dtypes.values()).count("BF16") > len(dtypes), notes)


def _format_names(names: Collection[str]) -> list[str]:
    return [name for name in names_of_network(names) if name.endswith(f".{MARK}")]


def check_named(named: Collection[str], arrays: Arrays, index: Path) -> None:
    """Raise CheckpointError if no file has a tensor that the ``index`` of them names."""
    if missing := sorted(set(named) - arrays.keys()):
        raise CheckpointError(str(index), f"names {missing[0]}, which no file has", "copy the folder again")


def _object(text: str, path: Path, key: str) -> dict[str, Any]:
    """Return the JSON object that ``write`` stored under ``key`` of the header."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(str(path), f"cannot be read: {key!r} of its __metadata__ is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(str(path), f"cannot be read: {key!r} of its __metadata__ is no object in JSON")
    return content


def write(path: Path, state: State) -> None:
    """Write the weights."""
    known = {"facts": state.facts, "config": state.config}
    metadata = {key: json.dumps(value) for key, value in known.items() if value}
    write_arrays(path, state.weights, metadata, state.is_bfloat16)


def write_arrays(path: Path, arrays: Arrays, metadata: dict[str, str], as_bfloat16: bool = False) -> None:
    """Write a file as PyTorch's libraries expect it; raises OSError if the disk does not take it.

    as_bfloat16: write float32 arrays in bfloat16 if that loses nothing.
    """
    from safetensors import SafetensorError, serialize_file

    stored = {name: _stored(np.require(array, requirements=["C", "A"]), as_bfloat16) for name, array in arrays.items()}
    try:
        entries = {name: _entry(kind, array) for name, (kind, array) in stored.items()}
        serialize_file(entries, path, {"format": "pt", **metadata})
    except SafetensorError as error:
        raise OSError(str(error)) from None


def _stored(array: np.ndarray, as_bfloat16: bool) -> tuple[str, np.ndarray]:
    """Return the kind of number to write, and an array of its bits."""
    if as_bfloat16 and array.dtype == np.float32 and not (array.view(np.uint32) & 0xFFFF).any():
        return "bfloat16", (array.view(np.uint32) >> 16).astype("<u2")
    return array.dtype.name, array


def _entry(kind: str, array: np.ndarray) -> Any:
    """Return what ``serialize_file`` takes for an array, which must outlive the call: from 0.8 on its address."""
    import safetensors

    if hasattr(safetensors, "TensorSpec"):
        buffer = {"data_ptr": array.ctypes.data, "data_len": array.nbytes}
        return safetensors.TensorSpec(dtype=kind, shape=array.shape, **buffer)
    return {"dtype": kind, "shape": array.shape, "data": array.tobytes()}
