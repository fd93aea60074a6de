"""How diffusers' DiTTransformer2DModel names and splits the published tensors: a table of invertible rules.

diffusers repeats the timestep and label embedders in every block, and has separate query, key and value. It computes
the positional embedding, so its files have none. The tensors are the same, but not quite the network: diffusers spaces
the timestep's 128 frequencies by 1/127 (``downscale_freq_shift``), the published DiT by 1/128.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from mindspeed_mm_dit.checkpoint.compatibility import check_names
from mindspeed_mm_dit.checkpoint.shapes import Shapes
from mindspeed_mm_dit.configs.dit import DiTConfig
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.models.on_paper import parameters_of
from mindspeed_mm_dit.models.positions import sincos_positions_2d

Arrays = dict[str, np.ndarray]


class Transform(NamedTuple):
    """Splits one published tensor into ``n`` of diffusers', and joins them again."""

    split: Callable[[np.ndarray, int], list[np.ndarray]]
    join: Callable[[list[np.ndarray]], np.ndarray]


def _join_repeated(copies: list[np.ndarray]) -> np.ndarray:
    if any(copy.tobytes() != copies[0].tobytes() for copy in copies):
        raise ValueError("differs from block to block; the published model shares it")
    return copies[0]


RENAMED = Transform(lambda array, n: [array], lambda parts: parts[0])
REPEATED = Transform(lambda array, n: [array] * n, _join_repeated)
STACKED = Transform(lambda array, n: np.split(array, n), np.concatenate)


class Rule(NamedTuple):
    """``*`` is a block's number: the same one on both sides, or every one if it is on diffusers' side alone."""

    published: str
    diffusers: tuple[str, ...]
    transform: Transform


_TIME, _LABEL = ("transformer_blocks.*.norm1.emb." + part for part in ("timestep_embedder", "class_embedder"))
_ATTENTION = "transformer_blocks.*.attn1"

LAYERS = (
    Rule("x_embedder.proj", ("pos_embed.proj",), RENAMED),
    Rule("t_embedder.mlp.0", (f"{_TIME}.linear_1",), REPEATED),
    Rule("t_embedder.mlp.2", (f"{_TIME}.linear_2",), REPEATED),
    Rule("blocks.*.adaLN_modulation.1", ("transformer_blocks.*.norm1.linear",), RENAMED),
    Rule("blocks.*.attn.qkv", (f"{_ATTENTION}.to_q", f"{_ATTENTION}.to_k", f"{_ATTENTION}.to_v"), STACKED),
    Rule("blocks.*.attn.proj", (f"{_ATTENTION}.to_out.0",), RENAMED),
    Rule("blocks.*.mlp.fc1", ("transformer_blocks.*.ff.net.0.proj",), RENAMED),
    Rule("blocks.*.mlp.fc2", ("transformer_blocks.*.ff.net.2",), RENAMED),
    Rule("final_layer.adaLN_modulation.1", ("proj_out_1",), RENAMED),
    Rule("final_layer.linear", ("proj_out_2",), RENAMED),
)
"""Layers with a weight and a bias."""

RULES = (
    *(Rule(f"{r.published}.{p}", tuple(f"{d}.{p}" for d in r.diffusers), r.transform)
      for r in LAYERS for p in ("weight", "bias")),
    Rule("y_embedder.embedding_table.weight", (f"{_LABEL}.embedding_table.weight",), REPEATED),
)  # fmt: skip


def for_model(num_layers: int) -> Iterator[Rule]:
    """Yield the rules with the numbers of the blocks filled in."""
    blocks = [str(i) for i in range(num_layers)]
    for published, diffusers, transform in RULES:
        if "*" in published:
            for i in blocks:
                yield Rule(published.replace("*", i), tuple(d.replace("*", i) for d in diffusers), transform)
        elif "*" in diffusers[0]:
            yield Rule(published, tuple(diffusers[0].replace("*", i) for i in blocks), transform)
        else:
            yield Rule(published, diffusers, transform)


def to_diffusers(arrays: Mapping[str, np.ndarray], config: DiTConfig) -> Arrays:
    """Rename and split the tensors of a DiT; all of them must be there, and no others."""
    _check_positions(arrays["pos_embed"], config)
    return _split(arrays, config.num_layers)


def _split(arrays: Mapping[str, np.ndarray], num_layers: int) -> Arrays:
    out: Arrays = {}
    for published, diffusers, transform in for_model(num_layers):
        out.update(zip(diffusers, transform.split(arrays[published], len(diffusers))))
    return out


def from_diffusers(arrays: Mapping[str, np.ndarray], config: DiTConfig, what: str) -> Arrays:
    """Undo :func:`to_diffusers`; raises CheckpointError for unknown, missing and misshapen tensors of ``what``."""
    arrays = {name: array for name, array in arrays.items() if name != "pos_embed.pos_embed"}  # before 2024
    check_names(
        diffusers_shapes(config), {name: array.shape for name, array in arrays.items()}, what,
        "is not the network of its config.json", "copy or download the folder again",
    )  # fmt: skip
    out: Arrays = {"pos_embed": _positions(config)}
    for published, diffusers, transform in for_model(config.num_layers):
        try:
            out[published] = transform.join([arrays[name] for name in diffusers])
        except ValueError as error:
            raise CheckpointError(f"{what}: {diffusers[0]}", str(error)) from None
    return {name: out[name] for name in parameters_of(config).shapes()}


def diffusers_shapes(config: DiTConfig) -> Shapes:
    """Return the shapes of the same DiT by diffusers' names."""
    hollow = {name: np.broadcast_to(np.float32(0), shape) for name, shape in parameters_of(config).shapes().items()}
    return {name: array.shape for name, array in _split(hollow, config.num_layers).items()}


def _positions(config: DiTConfig) -> np.ndarray:
    return sincos_positions_2d(config.hidden_size, config.input_size // config.patch_size)[None]


def _check_positions(array: np.ndarray, config: DiTConfig) -> None:
    if np.abs(array.astype(np.float64) - _positions(config)).max() > (1e-2 if array.dtype == np.float16 else 1e-6):
        raise CheckpointError("SOURCE: pos_embed", "is not the sin-cos code that diffusers computes instead")
