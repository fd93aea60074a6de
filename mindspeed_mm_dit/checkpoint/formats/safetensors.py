"""One set of weights as ``.safetensors``; facts of the run and diffusers' config travel in its header."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from mindspeed_mm_dit.checkpoint.state import Arrays, State
from mindspeed_mm_dit.framework.safetensors_file import read_safetensors_file


def fits(path: Path) -> bool:
    """Return whether ``path`` is a safetensors file, by its ending."""
    return path.is_file() and path.suffix == ".safetensors"


def read(path: Path) -> State:
    """Read a file; bfloat16, which NumPy lacks, comes as float32."""
    arrays, metadata = read_safetensors_file(path)
    known = {key: json.loads(metadata[key]) for key in ("facts", "config") if key in metadata}
    return State({"model": arrays}, **known)


def write(path: Path, state: State) -> None:
    """Write the weights."""
    known = {"facts": state.facts, "config": state.config}
    write_arrays(path, state.weights, {key: json.dumps(value) for key, value in known.items() if value})


def write_arrays(path: Path, arrays: Arrays, metadata: dict[str, str]) -> None:
    """Write a file as PyTorch's libraries expect it."""
    from safetensors.numpy import save_file

    whole = {name: np.require(array, requirements=["C", "A"]) for name, array in arrays.items()}
    save_file(whole, path, {"format": "pt", **metadata})
