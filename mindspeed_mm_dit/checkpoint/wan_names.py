"""Names of Wan's parameters in its authors' code, and here, which are diffusers'.

Their ``norm3``, the norm of a block that has weights, is diffusers' ``norm2``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

_ATTENTION = {"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o"}
WAN_BLOCK = {
    **{f"attn1.{ours}": f"self_attn.{native}" for ours, native in _ATTENTION.items()},
    **{f"attn2.{ours}": f"cross_attn.{native}" for ours, native in _ATTENTION.items()},
    "ffn.net.0.proj": "ffn.0", "ffn.net.2": "ffn.2",
}  # fmt: skip
"""Layers of a block of Wan here (diffusers' names) -> in Wan's own code."""
WAN_ENDS = {
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "proj_out": "head.head",
}
_IMAGE = "condition_embedder.image_embedder"
_OTHERS = {
    **{f"attn1.norm_{x}": f"self_attn.norm_{x}" for x in "qk"},
    **{f"attn2.norm_{x}": f"cross_attn.norm_{x}" for x in "qk"},
    "attn2.add_k_proj": "cross_attn.k_img", "attn2.add_v_proj": "cross_attn.v_img",
    "attn2.norm_added_k": "cross_attn.norm_k_img", "norm2": "norm3",
    f"{_IMAGE}.norm1": "img_emb.proj.0", f"{_IMAGE}.ff.net.0.proj": "img_emb.proj.1",
    f"{_IMAGE}.ff.net.2": "img_emb.proj.3", f"{_IMAGE}.norm2": "img_emb.proj.4",
}  # fmt: skip
_TABLES = {"modulation": "scale_shift_table", "head.modulation": "scale_shift_table",
           "img_emb.emb_pos": f"{_IMAGE}.pos_embed"}  # fmt: skip
_OURS = {native: ours for ours, native in {**WAN_BLOCK, **WAN_ENDS, **_OTHERS}.items()}


def from_wan_code(weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return ``weights`` by the names used here if they have those of Wan's own code; others stay as they are."""
    if not {"patch_embedding.weight", "time_embedding.0.weight"} <= weights.keys():
        return dict(weights)
    return {_ours(name): array for name, array in weights.items()}


def _ours(name: str) -> str:
    stem, rest = re.fullmatch(r"((?:blocks\.\d+\.)?)(.+)", name, re.DOTALL).groups()  # type: ignore[union-attr]
    layer, _, last = rest.rpartition(".")
    return f"{stem}{_TABLES[rest]}" if rest in _TABLES else f"{stem}{_OURS.get(layer, layer)}.{last}"
