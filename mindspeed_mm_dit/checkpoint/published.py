"""Bring weights from files of other programs to the published names: drop prefixes, tables and other extras."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit.checkpoint.families import from_original
from mindspeed_mm_dit.checkpoint.quantized import check_are_floats
from mindspeed_mm_dit.configs.limits import short_repr
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.models.positions import rotary_tables_2d

Arrays = dict[str, np.ndarray]

_TREES = {
    "model": ("model", "model_state_dict", "state_dict", "module", "params"),
    "ema": ("ema", "model_ema1", "ema_state_dict", "ema_model", "model_ema", "params_ema"),
}
"""Our name of a set of weights -> keys in a file, DeepSpeed's "module" among them. JiT keeps two EMAs, and samples with
the first."""
_PREFIXES = ("module.", "_orig_mod.", "net.", "model.", "diffusion_model.")
"""Prefixes of all names if the network is part of another module: DDP's, torch.compile's, JiT's, Lightning's."""
_NETWORK = "model.diffusion_model."
_OTHER_MODELS = ("first_stage_model.", "cond_stage_model.", "conditioner.", "text_encoders.", "vae.")
"""Prefix of a network, and those of autoencoder and text encoders, in one file, as Stability AI publishes them."""
_COUNTS = ("n_averaged",)
"""Tensors other than weights in torch.optim's AveragedModel."""
_TABLES = {"feat_rope.freqs_cos": 0, "feat_rope.freqs_sin": 1}
"""Tables of rotary embeddings in LightningDiT's files, which are computed here -> index in ``rotary_tables_2d``."""
_TABLE_ERROR = 1e-2
"""Largest allowed difference from our table: the rounding of bfloat16, far less than that of other positions."""


def trees_of(content: Any, path: str | Path) -> dict[str, Arrays]:
    """Return the sets of weights in the content of a file, by our names; a bare state dict is "model".

    Raises CheckpointError if it holds none.
    """
    if not isinstance(content, Mapping):
        raise CheckpointError(str(path), f"holds a {type(content).__name__}, not a dict")
    trees = {n: content[key] for n, keys in _TREES.items() for key in keys[::-1] if isinstance(content.get(key), dict)}
    if not trees and content and all(isinstance(value, np.ndarray) for value in content.values()):
        trees = {"model": content}
    if not trees:
        keys = ", ".join(map(str, list(content)[:8]))
        raise CheckpointError(str(path), f"holds no weights; its keys are: {keys}")
    if len(trees) == 1 and len(parts := _parts(trees.get("model", {}))) > 1:  # a module of both, as Lightning saves it
        return trees_of(parts, path)
    return {name: plain(weights, path) for name, weights in trees.items()}


def _parts(weights: Mapping[Any, Any]) -> dict[str, Arrays]:
    """Return a state dict by the first parts of its names, if all are keys of ``_TREES``."""
    parts: dict[str, Arrays] = {}
    for name, array in weights.items():
        first, _, rest = str(name).partition(".")
        parts.setdefault(first, {})[rest] = array
    return parts if all(any(part in keys for keys in _TREES.values()) for part in parts) else {}


def plain(weights: Mapping[Any, Any], path: str | Path = "SOURCE") -> Arrays:
    """Return the parameters of a state dict under the names used here.

    Raises CheckpointError if a table that is computed here holds other positions, or an entry is no tensor.
    """
    weights = {str(name): array for name, array in weights.items() if name not in _COUNTS}
    for name, array in weights.items():
        if not isinstance(array, np.ndarray):
            raise CheckpointError(f"{path}: {short_repr(name)}", "is no tensor that is read here", "save weights alone")
    weights = {name: weights[name] for name in names_of_network(weights)}
    check_are_floats(weights, str(path))
    while prefix := next((p for p in _PREFIXES if weights and all(name.startswith(p) for name in weights)), None):
        weights = {name.removeprefix(prefix): array for name, array in weights.items()}
    weights = from_original(weights)
    for name in _TABLES.keys() & weights.keys():
        _check_table(name, weights[name])
    return {name: array for name, array in weights.items() if name not in _TABLES}


def names_of_network(names: Collection[str]) -> list[str]:
    """Return ``names`` without those of an autoencoder and text encoders, if a file holds a whole pipeline."""
    is_pipeline = any(name.startswith(_NETWORK) for name in names)
    return [name for name in names if not (is_pipeline and name.startswith(_OTHER_MODELS))]


def without_projectors(weights: Mapping[str, np.ndarray]) -> Arrays:
    """Return ``weights``, or an optimizer's state, without the projectors to a teacher's features (REPA)."""
    named = ("projectors.", "state.projectors.")
    return {name: array for name, array in weights.items() if not name.startswith(named)}


def _check_table(name: str, table: np.ndarray) -> None:
    """Raise CheckpointError unless ``table`` (N, head_dim / 2 twice) is that of a square of patches counted from 0."""
    side = round(len(table) ** 0.5) if table.ndim == 2 else 0
    ours = rotary_tables_2d(table.shape[-1], side)[_TABLES[name]].repeat(2, axis=1) if side else np.zeros(0)
    if ours.shape != table.shape or np.abs(ours - table).max() > _TABLE_ERROR:
        raise CheckpointError(
            name,
            "is not the table of rotary positions of a square of patches, counted from 0, which is computed here",
            "weights that were trained with other positions cannot be used",
        )
