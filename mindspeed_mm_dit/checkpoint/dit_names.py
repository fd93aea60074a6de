"""Tensor names of a DiT in diffusers. Ours are those of the published code.

DiTTransformer2DModel repeats the timestep and label embedders in every block, and has separate query, key and value. It
computes the positional embedding, so its files have none. The tensors are the same, but not quite the network:
diffusers spaces the timestep's 128 frequencies by 1/127 (``downscale_freq_shift``), the published DiT by 1/128.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mindspeed_mm_dit.checkpoint import rules
from mindspeed_mm_dit.checkpoint.compatibility import check_names
from mindspeed_mm_dit.checkpoint.rules import REPEATED, STACKED, Arrays, Rule
from mindspeed_mm_dit.configs.dit import DiTConfig
from mindspeed_mm_dit.configs.predictor import Shape
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.models.positions import sincos_positions_2d

_TIME, _LABEL = ("transformer_blocks.*.norm1.emb." + part for part in ("timestep_embedder", "class_embedder"))
_ATTENTION = "transformer_blocks.*.attn1"
DIT_RULES = (
    Rule("x_embedder.proj", ("pos_embed.proj",)),
    Rule("t_embedder.mlp.0", (f"{_TIME}.linear_1",), REPEATED),
    Rule("t_embedder.mlp.2", (f"{_TIME}.linear_2",), REPEATED),
    Rule("y_embedder.embedding_table", (f"{_LABEL}.embedding_table",), REPEATED),
    Rule("blocks.*.adaLN_modulation.1", ("transformer_blocks.*.norm1.linear",)),
    Rule("blocks.*.attn.qkv", (f"{_ATTENTION}.to_q", f"{_ATTENTION}.to_k", f"{_ATTENTION}.to_v"), STACKED),
    Rule("blocks.*.attn.proj", (f"{_ATTENTION}.to_out.0",)),
    Rule("blocks.*.mlp.fc1", ("transformer_blocks.*.ff.net.0.proj",)),
    Rule("blocks.*.mlp.fc2", ("transformer_blocks.*.ff.net.2",)),
    Rule("final_layer.adaLN_modulation.1", ("proj_out_1",)),
    Rule("final_layer.linear", ("proj_out_2",)),
)


def to_diffusers(arrays: Mapping[str, np.ndarray], config: DiTConfig) -> Arrays:
    """Rename and split the tensors of a DiT; all of them must be there, and no others."""
    arrays = dict(arrays)
    _check_positions(arrays.pop("pos_embed"), config)
    return rules.to_diffusers(arrays, DIT_RULES)


def from_diffusers(arrays: Mapping[str, np.ndarray], config: DiTConfig, what: str) -> Arrays:
    """Undo :func:`to_diffusers`; raises CheckpointError for unknown, missing and misshapen tensors of ``what``."""
    arrays = {name: array for name, array in arrays.items() if name != "pos_embed.pos_embed"}  # before 2024
    check_names(
        diffusers_shapes(config), {name: array.shape for name, array in arrays.items()}, what,
        "is not the network of its config.json", "copy or download the folder again",
    )  # fmt: skip
    try:
        out = {"pos_embed": _positions(config), **rules.to_original(arrays, DIT_RULES)}
    except ValueError as error:
        name, problem = error.args
        raise CheckpointError(f"{what}: {name}", problem) from None
    return {name: out[name] for name in parameters_of(config).shapes()}


def diffusers_shapes(config: DiTConfig) -> dict[str, Shape]:
    """Return the shapes of the same DiT by diffusers' names."""
    shapes = {name: shape for name, shape in parameters_of(config).shapes().items() if name != "pos_embed"}
    meta_arrays = {name: np.broadcast_to(np.float32(0), shape) for name, shape in shapes.items()}
    return {name: array.shape for name, array in rules.to_diffusers(meta_arrays, DIT_RULES).items()}


def _positions(config: DiTConfig) -> np.ndarray:
    return sincos_positions_2d(config.hidden_size, config.input_size // config.patch_size)[None]


def _check_positions(array: np.ndarray, config: DiTConfig) -> None:
    if np.abs(array.astype(np.float64) - _positions(config)).max() > (1e-2 if array.dtype == np.float16 else 1e-6):
        raise CheckpointError("SOURCE: pos_embed", "is not the sin-cos code that diffusers computes instead")
