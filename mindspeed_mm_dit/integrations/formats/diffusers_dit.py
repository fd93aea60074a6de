"""A DiT in diffusers, whose names and timestep code are not the published ones that we have.

DiTTransformer2DModel repeats the timestep and label embedders in every block, and has separate query, key and value. It
computes the positional embedding, so its files have none. The tensors are the same, but not quite the network: both
codes of a timestep are cosines and sines of 128 angles, timestep times frequency. The published frequencies are
10000^(-i / 128), those of diffusers 10000^(-i / 127) (``downscale_freq_shift``), so the first layer of the timestep
embedder gets other inputs there. For up to about 50 timesteps a linear map turns diffusers' code into the published
one. A pipeline gets the layer changed by the smallest such map; at other timesteps it is about as wrong as unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mindspeed_mm_dit.checkpoint.state import Arrays, check_names, shapes_of
from mindspeed_mm_dit.configs.dit import DiTConfig
from mindspeed_mm_dit.configs.limits import check_between
from mindspeed_mm_dit.configs.predictor import Shape
from mindspeed_mm_dit.errors import CheckpointError, ConfigError
from mindspeed_mm_dit.integrations.formats import rules
from mindspeed_mm_dit.integrations.formats.families import DIT_RULES
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.models.positions import FREQUENCY_WIDTH, sincos_positions_2d, timestep_frequencies

TABLE = "y_embedder.embedding_table.weight"
"""Published name of the class embedding table, (classes + 1, D); its last row is the unconditional class."""
UNCONDITIONAL_CLASS = 1000
"""The unconditional class of DiTPipeline, whichever label the network has for it."""
LAYER = "t_embedder.mlp.0.weight"
"""Published name of the layer that takes the timestep code, (D, 256)."""
STEPS = 50
"""Default of DiTPipeline; trajectories of 25, 10, 5, 2 and 1 steps visit some of the same timesteps."""
_SMALLEST = 1e-3
"""If the smallest singular value of the codes is below this, float32 cannot tell the timesteps apart."""
WRONG_CONFIG_ERROR = ("is not the network of its config.json", "Copy or download the folder again.")


# --- names ------------------------------------------------------------------------------------------------------------


def to_diffusers(arrays: Mapping[str, np.ndarray], config: DiTConfig) -> Arrays:
    """Rename and split the tensors of a DiT; all of them must be there, and no others."""
    arrays = dict(arrays)
    positions = arrays.pop("pos_embed")
    difference = np.abs(positions.astype(np.float64) - _positions(config)).max()
    if difference > (1e-2 if positions.dtype == np.float16 else 1e-6):
        raise CheckpointError(
            "pos_embed of SOURCE is not the sin-cos code that diffusers computes instead. Convert to safetensors, .pt "
            "or .ckpt."
        )
    return rules.to_diffusers(arrays, DIT_RULES)


def from_diffusers(arrays: Mapping[str, np.ndarray], config: DiTConfig, what: str) -> Arrays:
    """Undo :func:`to_diffusers`; raises CheckpointError for unknown, missing and misshapen tensors of ``what``."""
    arrays = {name: array for name, array in arrays.items() if name != "pos_embed.pos_embed"}  # before 2024
    check_names(diffusers_shapes(config), shapes_of(arrays), what, *WRONG_CONFIG_ERROR)
    try:
        out = {"pos_embed": _positions(config), **rules.to_original(arrays, DIT_RULES)}
    except ValueError as error:
        name, problem = error.args
        raise CheckpointError(f"{what}: {name} {problem}.") from None
    return {name: out[name] for name in parameters_of(config).shapes()}


def diffusers_shapes(config: DiTConfig) -> dict[str, Shape]:
    """Return the shapes of the same DiT by diffusers' names."""
    shapes = {name: shape for name, shape in parameters_of(config).shapes().items() if name != "pos_embed"}
    meta_arrays = {name: np.broadcast_to(np.float32(0), shape) for name, shape in shapes.items()}
    return shapes_of(rules.to_diffusers(meta_arrays, DIT_RULES))


def _positions(config: DiTConfig) -> np.ndarray:
    return sincos_positions_2d(config.hidden_size, config.input_size // config.patch_size)[None]


# --- what a pipeline needs changed ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Changes:
    """Keys of changed_for_diffusers.json: how the network in a pipeline written here differs from the original."""

    right_at: tuple[int, ...]
    """Timesteps at which its changed layer of the timestep code is right."""
    num_classes: int
    """The network's number of classes; all rows of the table from there on are the unconditional class."""

    def __post_init__(self) -> None:
        check_between("num_classes", self.num_classes, 1, UNCONDITIONAL_CLASS)


def convert_for_pipeline(weights: Arrays, changes: Changes) -> Arrays:
    """Adapt ``weights`` to DiTPipeline: to its timestep code, and to its label of the unconditional class."""
    *classes, unconditional = weights[TABLE]
    layer = weights[LAYER]
    return weights | {
        LAYER: (layer.astype(np.float64) @ conversion_matrix(np.array(changes.right_at)).T).astype(layer.dtype),
        TABLE: np.stack([*classes, *[unconditional] * (UNCONDITIONAL_CLASS + 1 - changes.num_classes)]),
    }


def convert_from_pipeline(weights: Arrays, changes: Changes) -> Arrays:
    """Undo :func:`convert_for_pipeline`: the layer of the timestep code up to rounding, the table bit for bit."""
    table, layer = weights[TABLE], weights[LAYER]
    original = np.linalg.solve(conversion_matrix(np.array(changes.right_at)), layer.astype(np.float64).T).T
    return weights | {
        LAYER: original.astype(layer.dtype),
        TABLE: np.concatenate([table[: changes.num_classes], table[-1:]]),
    }


def ddim_timesteps(num_train_timesteps: int) -> np.ndarray:
    """Return the timesteps of a DDIM trajectory with diffusers' "leading" spacing, ascending, (STEPS,) int64."""
    return np.arange(STEPS) * (num_train_timesteps // STEPS)


def diffusers_frequencies() -> np.ndarray:
    """Return the frequencies of diffusers' DiT, (128,) float32, rounded as PyTorch rounds them."""
    half = FREQUENCY_WIDTH // 2
    exponent = np.float32(-math.log(10000)) * np.arange(half, dtype=np.float32) / np.float32(half - 1)
    return np.exp(exponent.astype(np.float64)).astype(np.float32)


def sinusoids(timesteps: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """Return the code of ``timesteps`` (N,), cosines and then sines of the angles: (N, 256) float64."""
    angles = np.outer(timesteps, frequencies.astype(np.float64))
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1)


def conversion_matrix(timesteps: np.ndarray) -> np.ndarray:
    """Return K (256, 256) float64: the weights W K^T give for diffusers' code what W gives for the published one.

    With diffusers' codes X and the published codes Y, X K = Y at ``timesteps`` (N,). Of all such maps, the one with the
    smallest K - 1 is K = 1 + X^+ (Y - X).

    Raises:
        ConfigError: the timesteps are too many, or too close to each other, for one map.
    """
    theirs = sinusoids(timesteps, diffusers_frequencies())
    if np.linalg.svd(theirs, compute_uv=False)[-1] < _SMALLEST:
        raise ConfigError(
            f"diffusion.num_train_timesteps is too small: the {len(timesteps)} timesteps from 0 to {timesteps[-1]} of "
            "a trajectory are too close together for diffusers' timestep code. Convert the network alone (--to "
            "diffusers)."
        )
    ours = sinusoids(timesteps, timestep_frequencies(FREQUENCY_WIDTH))
    return np.eye(FREQUENCY_WIDTH) + np.linalg.pinv(theirs) @ (ours - theirs)
