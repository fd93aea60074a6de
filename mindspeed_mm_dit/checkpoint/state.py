"""The content of a checkpoint of any format, by the published names, and checks that it is whole and fits a network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit.checkpoint import power_ema
from mindspeed_mm_dit.checkpoint.store import RESTORE_IT
from mindspeed_mm_dit.configs.model import PREDICTOR_CONFIGS, ModelConfig, model_config_from_mapping
from mindspeed_mm_dit.configs.predictor import PredictorConfig, Shape
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.models.weight_adapters import weight_converter_of

Arrays = dict[str, np.ndarray]
"""Tensors by name. Matrices of few bits are ``StoredArray`` (``framework/low_bit.py``), which act as arrays of float32;
``np.asarray`` makes an array of one."""
Shapes = dict[str, Shape]

TREES = ("model", "ema", "optimizer")
"""Weights, their EMA, and the optimizer's state: ``state.NAME.step``, and what else its rule keeps of ``NAME``, such as
AdamW's ``state.NAME.exp_avg``. A run's checkpoint may also have power-function EMAs, ``power_ema_1`` and so on."""

LEARNED_SETTINGS = {
    "predictor": ("model_id", "num_heads", "num_attention_heads"),
    "diffusion": ("model_id", "prediction_type", "noise_schedule", "num_train_timesteps", "path"),
}
"""Settings that no tensor shows, and without which weights cannot be interpreted."""


@dataclass(frozen=True)
class State:
    """Trees of arrays, and what is known about the run and the network."""

    trees: dict[str, Arrays]
    """By names that ``is_tree`` accepts; a single set of weights without a name is "model"."""
    facts: dict[str, Any] = field(default_factory=dict)
    """The content of run.json; empty if there is none."""
    config: dict[str, Any] = field(default_factory=dict)
    """The content of diffusers' config.json; empty if there is none."""
    predictor: PredictorConfig | None = None
    """The network that ``config`` describes, if it is one whose names here are diffusers'."""
    lacking: tuple[str, str] | None = None
    """Kind of network that the names are almost those of, and its tensor that is missing; None: nothing is missing."""
    is_bfloat16: bool = False
    """Whether the file had most weights in bfloat16, as which they are written again where the format has it."""
    written_as: str = ""
    """Format of few bits in which a .safetensors file is to have the weights of linear layers; empty: as numbers."""
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

    def check_family(self, what: str, kind: str | None = None) -> None:
        """Raise CheckpointError if the tensor that identifies its kind of network is missing, ``kind`` if known."""
        if self.lacking and kind in (None, self.lacking[0]):
            raise CheckpointError(
                f"{what} holds a network of kind {self.lacking[0]!r} without its tensor {self.lacking[1]}. Copy or "
                "download it again."
            )


def is_tree(name: str) -> bool:
    """Return whether ``name`` is the name of a tree."""
    return name in TREES or name.startswith(power_ema.TREE)


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
            raise CheckpointError(f"SOURCE has a tensor {name}, which belongs to none of {', '.join(TREES)}.")
        trees.setdefault(tree, {})[rest] = array
    return trees


def shapes_of(arrays: Mapping[str, np.ndarray]) -> Shapes:
    """Return the shape of each array by its name."""
    return {name: array.shape for name, array in arrays.items()}


def without_projectors(weights: Mapping[str, np.ndarray]) -> Arrays:
    """Return ``weights``, or an optimizer's state, without the projectors to a teacher's features (REPA)."""
    named = ("projectors.", "state.projectors.")
    return {name: array for name, array in weights.items() if not name.startswith(named)}


def infer_predictor(
    shapes: Mapping[str, Shape], facts: Mapping[str, Any], described: PredictorConfig | None = None
) -> PredictorConfig:
    """Return the architecture of the predictor whose tensors have ``shapes``.

    facts: content of run.json, used if the shapes do not determine the network; may be empty.
    described: the network by its config.json, if that is known.

    Raises:
        CheckpointError: the network is unknown, or a tensor that decides its sizes is missing.
    """
    if described is not None:
        return described
    for kind in PREDICTOR_CONFIGS.values():
        if (inferred := weight_converter_of(kind).of_shapes(shapes)) is not None:
            return inferred
    if "model" in facts:
        predictor: PredictorConfig = model_config_from_mapping(facts["model"], "model.json").predictor
        return predictor
    names = ", ".join(list(shapes)[:5])
    raise CheckpointError(
        f"SOURCE holds neither a known predictor nor an AutoencoderKL, but tensors such as {names}. Give the "
        "model.json that it was trained with (--model)."
    )


def first_differing_setting(here: ModelConfig, there: ModelConfig) -> tuple[str, Any, Any] | None:
    """Return the first setting of LEARNED_SETTINGS in which two models differ, with its value in each, or None."""
    for section, names in LEARNED_SETTINGS.items():
        ours, theirs = vars(getattr(here, section)), vars(getattr(there, section))
        for name in names:
            if ours.get(name) != theirs.get(name):
                return f"{section}.{name}", ours.get(name), theirs.get(name)
    return None


def check_whole(path: Path, find_damage: Callable[[Path], str | None]) -> None:
    """Raise CheckpointError, naming the file, if the checkpoint folder ``path`` is damaged."""
    problem = find_damage(path)
    if problem is not None:
        raise CheckpointError(f"{path} is damaged: {problem}. {RESTORE_IT}")


def check_names(
    expected: Mapping[str, tuple[int, ...]],
    actual: Mapping[str, tuple[int, ...]],
    what: str,
    problem: str = "belongs to another architecture",
    advice: str = "Use the model.json that this checkpoint was trained with.",
) -> None:
    """Raise CheckpointError, naming the tensors, unless ``actual`` has exactly the names and shapes of ``expected``.

    problem: what is wrong with ``what`` then, worded to follow it; advice: a sentence.
    """
    missing = [f"{name} is missing" for name in expected if name not in actual]
    unknown = [f"{name} is not in this model" for name in actual if name not in expected]
    misshapen = [
        f"{name} is {tuple(actual[name])}, but {tuple(shape)} in this model"
        for name, shape in expected.items()
        if name in actual and tuple(actual[name]) != tuple(shape)
    ]
    by_turns = zip_longest(missing, unknown, misshapen)  # (so that the first six show each kind)
    if differences := [difference for group in by_turns for difference in group if difference]:
        more = f"; and {len(differences) - 6} more" if len(differences) > 6 else ""
        raise CheckpointError(f"{what} {problem}: {'; '.join(differences[:6])}{more}. {advice}")


def check_are_floats(weights: Mapping[str, np.ndarray], what: str) -> None:
    """Raise CheckpointError, naming the tensor, if weights are integers, and no counters of one number."""
    for name, array in weights.items():
        if array.dtype.kind in "biu" and (array.size > 1 or name.rpartition(".")[2] in ("weight", "bias")):
            raise CheckpointError(
                f"{what} stores {name} in {array.dtype}, and does not name the format of these numbers. Use a file in "
                "bfloat16, or in ComfyUI's float8 or int8."
            )
