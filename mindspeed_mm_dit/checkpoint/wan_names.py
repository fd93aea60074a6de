"""Wan in its authors' code; here it has diffusers' names.

Their ``norm3``, the norm of a block that has weights, is diffusers' ``norm2``.
"""

from __future__ import annotations

from mindspeed_mm_dit.checkpoint.rules import Rule

_ATTENTION = {"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o"}
WAN_BLOCK = {
    **{f"attn1.{ours}": f"self_attn.{native}" for ours, native in _ATTENTION.items()},
    **{f"attn2.{ours}": f"cross_attn.{native}" for ours, native in _ATTENTION.items()},
    "ffn.net.0.proj": "ffn.0", "ffn.net.2": "ffn.2",
}  # fmt: skip
"""Layers of a block here (diffusers' names) -> in Wan's own code."""
_IMAGE = "condition_embedder.image_embedder"
_OTHERS = {
    **{f"attn1.norm_{x}": f"self_attn.norm_{x}" for x in "qk"},
    **{f"attn2.norm_{x}": f"cross_attn.norm_{x}" for x in "qk"},
    "attn2.add_k_proj": "cross_attn.k_img", "attn2.add_v_proj": "cross_attn.v_img",
    "attn2.norm_added_k": "cross_attn.norm_k_img", "norm2": "norm3", "scale_shift_table": "modulation",
}  # fmt: skip
_ENDS = {
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "proj_out": "head.head", "scale_shift_table": "head.modulation",
    f"{_IMAGE}.norm1": "img_emb.proj.0", f"{_IMAGE}.ff.net.0.proj": "img_emb.proj.1",
    f"{_IMAGE}.ff.net.2": "img_emb.proj.3", f"{_IMAGE}.norm2": "img_emb.proj.4",
    f"{_IMAGE}.pos_embed": "img_emb.emb_pos",
}  # fmt: skip
WAN_RULES = (
    *(Rule(native, (ours,)) for ours, native in _ENDS.items()),
    *(Rule(f"blocks.*.{native}", (f"blocks.*.{ours}",)) for ours, native in {**WAN_BLOCK, **_OTHERS}.items()),
)
