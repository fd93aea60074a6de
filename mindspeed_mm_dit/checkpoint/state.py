"""The content of a checkpoint of any format, by the published names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mindspeed_mm_dit.checkpoint import power_ema
from mindspeed_mm_dit.errors import CheckpointError

Arrays = dict[str, np.ndarray]

TREES = ("model", "ema", "optimizer")
"""Weights, their EMA, and the optimizer's state: ``state.NAME.step``, and what else its rule keeps of ``NAME``, such as
AdamW's ``state.NAME.exp_avg``. A run's checkpoint may also have power-function EMAs, ``power_ema_1`` and so on."""


def is_tree(name: str) -> bool:
    """Return whether ``name`` is the name of a tree."""
    return name in TREES or name.startswith(power_ema.TREE)


@dataclass(frozen=True)
class State:
    """Trees of arrays, and what is known about the run and the network."""

    trees: dict[str, Arrays]
    """By names that ``is_tree`` accepts; a single set of weights without a name is "model"."""
    facts: dict[str, Any] = field(default_factory=dict)
    """The content of run.json; empty if there is none."""
    config: dict[str, Any] = field(default_factory=dict)
    """The content of diffusers' config.json; empty if there is none."""
    is_bfloat16: bool = False
    """Whether the file had most weights in bfloat16, as which they are written again where the format has it."""
    notes: tuple[str, ...] = ()
    """Notes for the user on how it was read, a sentence each."""

    @property
    def is_autoencoder(self) -> bool:
        """Return whether it is an AutoencoderKL and no predictor, by a name that every AutoencoderKL has."""
        return any(name.startswith("decoder.conv_in.") for name in self.weights)

    @property
    def weights(self) -> Arrays:
        """Return the first tree: the weights."""
        return next(iter(self.trees.values()))

    @property
    def num_tensors(self) -> int:
        """Return the number of arrays in all trees."""
        return sum(map(len, self.trees.values()))

    @property
    def num_bytes(self) -> int:
        """Return the size of all arrays."""
        return sum(array.nbytes for tree in self.trees.values() for array in tree.values())

    def with_trees(self, trees: dict[str, Arrays]) -> State:
        """Return the same state with other arrays."""
        return replace(self, trees=trees)


def flatten(trees: Mapping[str, Arrays]) -> Arrays:
    """Return the trees as one, ``model.NAME`` and so on, as the training checkpoints name them."""
    return {f"{tree}.{name}": array for tree, arrays in trees.items() for name, array in arrays.items()}


def unflatten(arrays: Arrays) -> dict[str, Arrays]:
    """Undo :func:`flatten`; names without a tree are a single set of weights."""
    if not any(name.startswith("model.") for name in arrays):
        return {"model": arrays}
    trees: dict[str, Arrays] = {}
    for name, array in arrays.items():
        tree, _, rest = name.partition(".")
        if not is_tree(tree):
            raise CheckpointError("SOURCE", f"{name} belongs to none of {', '.join(TREES)}")
        trees.setdefault(tree, {})[rest] = array
    return trees
