"""FLUX, Stable Diffusion 3 and Z-Image in the code of their authors, whose names single files and ComfyUI have."""

from __future__ import annotations

from mindspeed_mm_dit.checkpoint.rules import STACKED, SWAPPED, Rule, stacked

_IMAGE_QKV, _TEXT_QKV = ("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj")


def _two_layers(theirs: str, ours: str, first: str, second: str) -> tuple[Rule, ...]:
    """Return the rules of an MLP that embeds a condition."""
    return Rule(f"{theirs}.{first}", (f"{ours}.linear_1",)), Rule(f"{theirs}.{second}", (f"{ours}.linear_2",))


def _block(theirs: str, ours: str, layers: dict[str, str]) -> tuple[Rule, ...]:
    return tuple(Rule(f"{theirs}.{their_layer}", (f"{ours}.{our_layer}",)) for their_layer, our_layer in layers.items())


def _qkv(theirs: str, ours: str, names: tuple[str, ...] = _IMAGE_QKV) -> Rule:
    return Rule(theirs, tuple(f"{ours}.{name}" for name in names), STACKED)


_DOUBLE, _SINGLE = "double_blocks.*", "single_blocks.*"
_OURS, _OUR_SINGLE = "transformer_blocks.*", "single_transformer_blocks.*"
_BOTH_FLUX = (
    Rule("img_in", ("x_embedder",)),
    Rule("txt_in", ("context_embedder",)),
    Rule("final_layer.linear", ("proj_out",)),
    Rule("final_layer.adaLN_modulation.1", ("norm_out.linear",), SWAPPED),
    _qkv(f"{_DOUBLE}.img_attn.qkv", f"{_OURS}.attn"),
    _qkv(f"{_DOUBLE}.txt_attn.qkv", f"{_OURS}.attn", _TEXT_QKV),
    *_block(_DOUBLE, _OURS, {
        "img_attn.proj": "attn.to_out.0", "txt_attn.proj": "attn.to_add_out",
        "img_attn.norm.query_norm.scale": "attn.norm_q.weight", "img_attn.norm.key_norm.scale": "attn.norm_k.weight",
        "txt_attn.norm.query_norm.scale": "attn.norm_added_q.weight",
        "txt_attn.norm.key_norm.scale": "attn.norm_added_k.weight",
    }),
    *_block(_SINGLE, _OUR_SINGLE, {
        "norm.query_norm.scale": "attn.norm_q.weight", "norm.key_norm.scale": "attn.norm_k.weight",
    }),
)  # fmt: skip
_TIME = "time_text_embed"
FLUX_RULES = (
    *_BOTH_FLUX,
    *_two_layers("time_in", f"{_TIME}.timestep_embedder", "in_layer", "out_layer"),
    *_two_layers("guidance_in", f"{_TIME}.guidance_embedder", "in_layer", "out_layer"),
    *_two_layers("vector_in", f"{_TIME}.text_embedder", "in_layer", "out_layer"),
    *_block(_DOUBLE, _OURS, {
        "img_mod.lin": "norm1.linear", "txt_mod.lin": "norm1_context.linear",
        "img_mlp.0": "ff.net.0.proj", "img_mlp.2": "ff.net.2",
        "txt_mlp.0": "ff_context.net.0.proj", "txt_mlp.2": "ff_context.net.2",
    }),
    *_block(_SINGLE, _OUR_SINGLE, {"modulation.lin": "norm.linear", "linear2": "proj_out"}),
    Rule(
        f"{_SINGLE}.linear1", (*(f"{_OUR_SINGLE}.attn.{name}" for name in _IMAGE_QKV), f"{_OUR_SINGLE}.proj_mlp"),
        stacked(1, 1, 1, 4),
    ),
)  # fmt: skip

_TIME2 = "time_guidance_embed"
FLUX2_RULES = (
    *_BOTH_FLUX,
    *_two_layers("time_in", f"{_TIME2}.timestep_embedder", "in_layer", "out_layer"),
    *_two_layers("guidance_in", f"{_TIME2}.guidance_embedder", "in_layer", "out_layer"),
    *(Rule(f"{name}.lin", (f"{name}.linear",)) for name in (
        "double_stream_modulation_img", "double_stream_modulation_txt", "single_stream_modulation",
    )),
    *_block(_DOUBLE, _OURS, {
        "img_mlp.0": "ff.linear_in", "img_mlp.2": "ff.linear_out",
        "txt_mlp.0": "ff_context.linear_in", "txt_mlp.2": "ff_context.linear_out",
    }),
    *_block(_SINGLE, _OUR_SINGLE, {"linear1": "attn.to_qkv_mlp_proj", "linear2": "attn.to_out"}),
)  # fmt: skip

_X, _CONTEXT = "joint_blocks.*.x_block", "joint_blocks.*.context_block"
SD3_RULES = (
    Rule("pos_embed", ("pos_embed.pos_embed",)),
    Rule("x_embedder.proj", ("pos_embed.proj",)),
    Rule("context_embedder", ("context_embedder",)),
    *_two_layers("t_embedder.mlp", f"{_TIME}.timestep_embedder", "0", "2"),
    *_two_layers("y_embedder.mlp", f"{_TIME}.text_embedder", "0", "2"),
    Rule("final_layer.linear", ("proj_out",)),
    Rule("final_layer.adaLN_modulation.1", ("norm_out.linear",), SWAPPED),
    Rule(
        "joint_blocks.$.context_block.adaLN_modulation.1", ("transformer_blocks.$.norm1_context.linear",), SWAPPED
    ),  # (of the last block only a shift and a scale)
    _qkv(f"{_X}.attn.qkv", f"{_OURS}.attn"),
    _qkv(f"{_X}.attn2.qkv", f"{_OURS}.attn2"),
    _qkv(f"{_CONTEXT}.attn.qkv", f"{_OURS}.attn", _TEXT_QKV),
    *_block(_X, _OURS, {
        "adaLN_modulation.1": "norm1.linear", "attn.proj": "attn.to_out.0", "attn2.proj": "attn2.to_out.0",
        "attn.ln_q": "attn.norm_q", "attn.ln_k": "attn.norm_k", "attn2.ln_q": "attn2.norm_q",
        "attn2.ln_k": "attn2.norm_k", "mlp.fc1": "ff.net.0.proj", "mlp.fc2": "ff.net.2",
    }),
    *_block(_CONTEXT, _OURS, {
        "adaLN_modulation.1": "norm1_context.linear", "attn.proj": "attn.to_add_out", "attn.ln_q": "attn.norm_added_q",
        "attn.ln_k": "attn.norm_added_k", "mlp.fc1": "ff_context.net.0.proj", "mlp.fc2": "ff_context.net.2",
    }),
)  # fmt: skip

QWEN_IMAGE_LAYERS = (
    "img_in", "txt_in", "proj_out", "norm_out.linear",
    *(f"time_text_embed.timestep_embedder.linear_{number}" for number in (1, 2)),
    *(f"{_OURS}.attn.{name}" for name in (*_IMAGE_QKV, *_TEXT_QKV, "to_out.0", "to_add_out")),
    *(f"{_OURS}.{stream}_{layer}" for stream in ("img", "txt") for layer in ("mod.1", "mlp.net.0.proj", "mlp.net.2")),
)  # fmt: skip
QWEN_IMAGE_RULES = tuple(Rule(name, (name,)) for name in QWEN_IMAGE_LAYERS)
"""Its authors have diffusers' names."""

_STACKS = ("layers.*", "noise_refiner.*", "context_refiner.*")
Z_IMAGE_RULES = (
    Rule("x_embedder", ("all_x_embedder.2-1",)),
    Rule("final_layer.linear", ("all_final_layer.2-1.linear",)),
    Rule("final_layer.adaLN_modulation.1", ("all_final_layer.2-1.adaLN_modulation.1",)),
    *(Rule(name, (name,)) for name in ("t_embedder.mlp.0", "t_embedder.mlp.2", "cap_embedder.1")),
    *(_qkv(f"{stack}.attention.qkv", f"{stack}.attention") for stack in _STACKS),
    *(rule for stack in _STACKS for rule in _block(stack, stack, {
        "attention.out": "attention.to_out.0", "attention.q_norm": "attention.norm_q",
        "attention.k_norm": "attention.norm_k",
        **{name: name for name in (*(f"feed_forward.w{number}" for number in (1, 2, 3)), "adaLN_modulation.0")},
    })),
)  # fmt: skip
