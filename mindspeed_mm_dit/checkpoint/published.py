"""Bring weights from files of other programs to the published names: drop prefixes, tables and other extras."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.models.positions import rotary_tables_2d

Arrays = dict[str, np.ndarray]

_TREES = {"model": ("model",), "ema": ("ema", "model_ema1")}
"""Our name of a set of weights -> keys in a file. JiT keeps two EMAs, and samples with the first."""
_PREFIX = "net."
"""Prefix of each name if the network is part of a larger module (JiT)."""
_TABLES = {"feat_rope.freqs_cos": 0, "feat_rope.freqs_sin": 1}
"""Tables of rotary embeddings in LightningDiT's files, which are computed here -> index in ``rotary_tables_2d``."""
_TABLE_ERROR = 1e-2
"""Largest allowed difference from our table: the rounding of bfloat16, far less than that of other positions."""


def trees_of(content: Mapping[Any, Any]) -> dict[str, Arrays]:
    """Return the sets of weights in a training checkpoint, by our names; empty for a bare state dict."""
    return {
        name: plain(content[key]) for name, keys in _TREES.items() for key in keys if isinstance(content.get(key), dict)
    }


def plain(weights: Mapping[str, np.ndarray]) -> Arrays:
    """Return the parameters of a state dict under the names used here.

    Raises CheckpointError if a table that is computed here holds other positions.
    """
    if weights and all(name.startswith(_PREFIX) for name in weights):
        weights = {name.removeprefix(_PREFIX): array for name, array in weights.items()}
    for name in _TABLES.keys() & weights.keys():
        _check_table(name, weights[name])
    return {name: array for name, array in weights.items() if name not in _TABLES}


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
            name, "is not the table of rotary positions of a square of patches, counted from 0, which is computed here",
            "weights that were trained with other positions cannot be used",
        )  # fmt: skip
