"""One set of weights as ``.safetensors``; its header holds the facts of the run and diffusers' config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit.checkpoint.published import plain
from mindspeed_mm_dit.checkpoint.state import Arrays, State
from mindspeed_mm_dit.checkpoint.store import check_facts
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.framework.safetensors_file import read_safetensors_file


def fits(path: Path) -> bool:
    """Return whether ``path`` is a safetensors file, by its ending."""
    return path.is_file() and path.suffix == ".safetensors"


def read(path: Path) -> State:
    """Read a file; bfloat16, which NumPy lacks, comes as float32."""
    arrays, metadata = read_safetensors_file(path)
    known = {key: _object(metadata[key], path, key) for key in ("facts", "config") if key in metadata}
    check_facts(known.get("facts", {}), path)
    return State({"model": plain(arrays, path)}, **known)


def _object(text: str, path: Path, key: str) -> dict[str, Any]:
    """Return the JSON object that ``write`` stored under ``key`` of the header."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(str(path), f"cannot be read: {key!r} of its __metadata__ is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise CheckpointError(str(path), f"cannot be read: {key!r} of its __metadata__ is no object in JSON")
    return found


def write(path: Path, state: State) -> None:
    """Write the weights."""
    known = {"facts": state.facts, "config": state.config}
    write_arrays(path, state.weights, {key: json.dumps(value) for key, value in known.items() if value})


def write_arrays(path: Path, arrays: Arrays, metadata: dict[str, str]) -> None:
    """Write a file as PyTorch's libraries expect it; raises OSError if the disk does not take it."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    whole = {name: np.require(array, requirements=["C", "A"]) for name, array in arrays.items()}
    try:
        save_file(whole, path, {"format": "pt", **metadata})
    except SafetensorError as error:
        raise OSError(str(error)) from None
