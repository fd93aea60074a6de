"""A DiT's weights under diffusers' names (DiTTransformer2DModel), and back. No framework.

diffusers keeps one copy of the timestep and label embedders in every block, splits the attention's
projection in three, and computes the positions itself. Its sinusoids of a timestep divide by 127 where the
published model divides by 128 (``downscale_freq_shift=1``), so the same weights predict slightly differently there.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mindspeed_mm_dit.errors import CheckpointError

Arrays = dict[str, np.ndarray]

_WHOLE = {
    "x_embedder.proj": "pos_embed.proj",
    "final_layer.adaLN_modulation.1": "proj_out_1",
    "final_layer.linear": "proj_out_2",
}
_SHARED = {
    "t_embedder.mlp.0": "norm1.emb.timestep_embedder.linear_1",
    "t_embedder.mlp.2": "norm1.emb.timestep_embedder.linear_2",
    "y_embedder.embedding_table": "norm1.emb.class_embedder.embedding_table",
}
_BLOCK = {
    "adaLN_modulation.1": "norm1.linear",
    "attn.proj": "attn1.to_out.0",
    "mlp.fc1": "ff.net.0.proj",
    "mlp.fc2": "ff.net.2",
}
_QKV = ("attn1.to_q", "attn1.to_k", "attn1.to_v")


def to_diffusers(weights: Mapping[str, np.ndarray]) -> Arrays:
    """Rename the weights of a DiT to diffusers' names."""
    out: Arrays = {}
    blocks = sorted({int(name.split(".")[1]) for name in weights if name.startswith("blocks.")})
    for name, value in weights.items():
        module, _, kind = name.rpartition(".")
        if module in _WHOLE:
            out[f"{_WHOLE[module]}.{kind}"] = value
        elif module in _SHARED:
            out.update({f"transformer_blocks.{block}.{_SHARED[module]}.{kind}": value for block in blocks})
        elif module.startswith("blocks."):
            out.update(_block_to_diffusers(module, kind, value))
        elif name != "pos_embed":
            raise CheckpointError(name, "has no counterpart in diffusers' DiTTransformer2DModel")
    return out


def _block_to_diffusers(module: str, kind: str, value: np.ndarray) -> Arrays:
    _, block, inner = module.split(".", 2)
    prefix = f"transformer_blocks.{block}"
    if inner == "attn.qkv":
        return {f"{prefix}.{name}.{kind}": part for name, part in zip(_QKV, np.split(value, 3))}
    return {f"{prefix}.{_BLOCK[inner]}.{kind}": value}


def from_diffusers(weights: Mapping[str, np.ndarray]) -> Arrays:
    """Rename the weights of a DiTTransformer2DModel to ours; the positions are not among them."""
    out: Arrays = {}
    back = {theirs: ours for ours, theirs in _WHOLE.items()}
    for name, value in weights.items():
        module, _, kind = name.rpartition(".")
        if module in back:
            out[f"{back[module]}.{kind}"] = value
        elif module.startswith("transformer_blocks."):
            out.update(_block_from_diffusers(module, kind, value, weights))
        elif name != "pos_embed.pos_embed":
            raise CheckpointError(name, "has no counterpart in a DiT", "convert a DiTTransformer2DModel")
    return out


def _block_from_diffusers(module: str, kind: str, value: np.ndarray, weights: Mapping[str, np.ndarray]) -> Arrays:
    _, block, inner = module.split(".", 2)
    shared = {theirs: ours for ours, theirs in _SHARED.items()}
    own = {theirs: ours for ours, theirs in _BLOCK.items()}
    if inner in shared:
        return {f"{shared[inner]}.{kind}": value} if block == "0" else {}
    if inner == _QKV[0]:
        parts = [weights[f"transformer_blocks.{block}.{name}.{kind}"] for name in _QKV]
        return {f"blocks.{block}.attn.qkv.{kind}": np.concatenate(parts)}
    if inner in _QKV:
        return {}
    return {f"blocks.{block}.{own[inner]}.{kind}": value}
