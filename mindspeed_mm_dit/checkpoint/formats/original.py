"""One ``.safetensors`` file under the names of a network's authors, as ComfyUI and loaders of single files take it."""

from __future__ import annotations

from pathlib import Path

from mindspeed_mm_dit.checkpoint.families import FAMILIES, in_original_names
from mindspeed_mm_dit.checkpoint.formats import safetensors
from mindspeed_mm_dit.checkpoint.shapes import predictor_of
from mindspeed_mm_dit.checkpoint.state import State
from mindspeed_mm_dit.errors import ConfigError


def fits(path: Path) -> bool:
    """Return False: files under any names are read as ``.safetensors``."""
    return False


def write(path: Path, state: State) -> None:
    """Write the weights, and in the header what is known of the run; raises ConfigError if there are no such names."""
    shapes = {name: array.shape for name, array in state.weights.items()}
    kind = "an autoencoder" if state.is_autoencoder else predictor_of(shapes, state.facts, state.config).model_id
    if kind not in FAMILIES:
        raise ConfigError("--to original", f"there are no other names for {kind} here", "leave --to out")
    safetensors.write(path, state.with_trees({"model": in_original_names(state.weights, FAMILIES[kind])}))
