"""How the authors of each family of networks name and cut its tensors, and diffusers does: tables of invertible rules.

Each line of a table is one layer under its authors' name and under diffusers'. Braces are alternatives: on both sides
they pair, on the right alone they are the parts that one layer is cut into. ``*`` is a block's number, ``$`` that of
the last block. The last column is the transform if it is no plain renaming or cut into equal parts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mindspeed_mm_dit.checkpoint.state import Arrays
from mindspeed_mm_dit.framework.low_bit import join_rows, split_rows

LEAVES = ("", ".weight", ".bias")
"""What follows a layer in the name of a tensor; nothing if a rule names the tensor itself."""
_BLOCK = re.compile(r"(\w+)\.([0-9]{1,9})\.")


class Transform(NamedTuple):
    """Splits one tensor of the authors into ``n`` of diffusers', along its first axis, and joins them again."""

    split: Callable[[np.ndarray, int], list[np.ndarray]]
    join: Callable[[Sequence[np.ndarray]], np.ndarray]
    heights: tuple[int, ...] = (1,)
    """Heights of the parts, in proportion."""


def _join_repeated(copies: Sequence[np.ndarray]) -> np.ndarray:
    if any(copy.tobytes() != copies[0].tobytes() for copy in copies):
        raise ValueError("differs from block to block, and all blocks of the published network share it")
    return copies[0]


def stacked(*heights: int) -> Transform:
    """Return the transform of matrices on top of each other, of these heights in proportion."""
    ends, whole = np.cumsum(heights)[:-1], sum(heights)
    return Transform(lambda array, n: split_rows(array, ends * (len(array) // whole)), join_rows, heights)


def _halves_swapped(array: np.ndarray) -> np.ndarray:
    return join_rows(split_rows(array, [-(-len(array) // 2)])[::-1])


RENAMED = Transform(lambda array, n: [array], lambda parts: parts[0])
REPEATED = Transform(lambda array, n: [array] * n, _join_repeated)
STACKED = stacked(1, 1, 1)
SWAPPED = Transform(lambda array, n: [_halves_swapped(array)], lambda parts: _halves_swapped(parts[0]))
"""The authors compute the shift of a norm before its scale, diffusers after."""


class NameRule(NamedTuple):
    """A layer, or a tensor, under the name its authors gave it, and as diffusers has it.

    ``*`` is a block's number: the same one on both sides, or every one if it is on diffusers' side alone; ``$`` is that
    of the last block, whose rules come before those of all blocks.
    """

    original: str
    diffusers: tuple[str, ...]
    transform: Transform = RENAMED


Rules = Sequence[NameRule]


def numbers_in(names: Iterable[str]) -> dict[str, list[int]]:
    """Return the numbers of the blocks in ``names``, by what is before the number."""
    numbers: dict[str, set[int]] = {}
    for name in names:
        if match := _BLOCK.match(name):
            numbers.setdefault(match[1], set()).add(int(match[2]))
    return {prefix: sorted(numbers[prefix]) for prefix in numbers}


def block_ranges(rules: Rules, count: int) -> dict[str, Sequence[int]]:
    """Return the numbers of ``count`` blocks of each kind."""
    return {_block_prefix(rule.diffusers[0]): range(count) for rule in rules}


def expand_rules(rules: Rules, numbers: Mapping[str, Sequence[int]]) -> Iterator[NameRule]:
    """Yield the rules with block numbers filled in; ``numbers`` may be by the names of either side."""
    known = dict(numbers)
    for original, theirs in {(_block_prefix(rule.original), _block_prefix(rule.diffusers[0])) for rule in rules}:
        for here, there in ((original, theirs), (theirs, original)):
            if here and here not in known and there in known:
                known[here] = known[there]
    for rule in rules:
        blocks = known.get(_block_prefix(rule.diffusers[0]), ())
        if "$" in rule.original:
            yield from (_with_block_number(rule, "$", number) for number in blocks[-1:])
        elif "*" in rule.original:
            yield from (_with_block_number(rule, "*", number) for number in blocks)
        elif "*" in rule.diffusers[0]:
            yield rule._replace(diffusers=tuple(rule.diffusers[0].replace("*", str(i)) for i in blocks))
        else:
            yield rule


def _block_prefix(name: str) -> str:
    return re.split(r"\.[*$]\.", name)[0] if "*" in name or "$" in name else ""


def _with_block_number(rule: NameRule, mark: str, number: int) -> NameRule:
    filled = (name.replace(mark, str(number)) for name in (rule.original, *rule.diffusers))
    return NameRule(next(filled), tuple(filled), rule.transform)


def to_diffusers(arrays: Mapping[str, np.ndarray], rules: Rules) -> Arrays:
    """Rename and split the authors' tensors; those without a rule stay as they are."""
    remaining, renamed = dict(arrays), dict[str, np.ndarray]()
    for rule in expand_rules(rules, numbers_in(remaining)):
        for leaf in LEAVES:
            if (array := remaining.pop(rule.original + leaf, None)) is not None:
                count = len(rule.diffusers)
                parts = rule.transform.split(array, count) if array.ndim else [array] * count
                renamed.update(zip((name + leaf for name in rule.diffusers), parts))
    return {**renamed, **remaining}


def to_original(arrays: Mapping[str, np.ndarray], rules: Rules) -> Arrays:
    """Undo :func:`to_diffusers`; raises ValueError, with diffusers' name first, for parts that cannot be one."""
    remaining, renamed = dict(arrays), dict[str, np.ndarray]()
    for rule in expand_rules(rules, numbers_in(remaining)):
        for leaf in LEAVES:
            names = [name + leaf for name in rule.diffusers]
            if names and all(name in remaining for name in names):
                try:
                    renamed[rule.original + leaf] = rule.transform.join([remaining.pop(name) for name in names])
                except ValueError as error:
                    raise ValueError(names[0], str(error)) from None
    return {**renamed, **remaining}


_TRANSFORMS = {"swapped": SWAPPED, "repeated": REPEATED, "1:1:1:4": stacked(1, 1, 1, 4)}
_DIT = """
x_embedder.proj                   pos_embed.proj
t_embedder.mlp.{0,2}              transformer_blocks.*.norm1.emb.timestep_embedder.{linear_1,linear_2}        repeated
y_embedder.embedding_table        transformer_blocks.*.norm1.emb.class_embedder.embedding_table               repeated
blocks.*.adaLN_modulation.1       transformer_blocks.*.norm1.linear
blocks.*.attn.qkv                 transformer_blocks.*.attn1.{to_q,to_k,to_v}
blocks.*.attn.proj                transformer_blocks.*.attn1.to_out.0
blocks.*.mlp.{fc1,fc2}            transformer_blocks.*.ff.{net.0.proj,net.2}
final_layer.adaLN_modulation.1    proj_out_1
final_layer.linear                proj_out_2
"""
_WAN_ENDS = """
text_embedding.{0,2}              condition_embedder.text_embedder.{linear_1,linear_2}
time_embedding.{0,2}              condition_embedder.time_embedder.{linear_1,linear_2}
time_projection.1                 condition_embedder.time_proj
head.{head,modulation}            {proj_out,scale_shift_table}
img_emb.proj.{0,1,3,4}            condition_embedder.image_embedder.{norm1,ff.net.0.proj,ff.net.2,norm2}
img_emb.emb_pos                   condition_embedder.image_embedder.pos_embed
"""
_WAN_LAYERS = """
blocks.*.self_attn.{q,k,v,o}      blocks.*.attn1.{to_q,to_k,to_v,to_out.0}
blocks.*.cross_attn.{q,k,v,o}     blocks.*.attn2.{to_q,to_k,to_v,to_out.0}
blocks.*.ffn.{0,2}                blocks.*.ffn.{net.0.proj,net.2}
"""
# (their norm3, the norm of a block that has weights, is diffusers' norm2)
_WAN_OTHERS = """
blocks.*.self_attn.{norm_q,norm_k}                  blocks.*.attn1.{norm_q,norm_k}
blocks.*.cross_attn.{norm_q,norm_k}                 blocks.*.attn2.{norm_q,norm_k}
blocks.*.cross_attn.{k_img,v_img,norm_k_img}        blocks.*.attn2.{add_k_proj,add_v_proj,norm_added_k}
blocks.*.{norm3,modulation}                         blocks.*.{norm2,scale_shift_table}
"""
_BOTH_FLUX = """
{img_in,txt_in}                                     {x_embedder,context_embedder}
final_layer.linear                                  proj_out
final_layer.adaLN_modulation.1                      norm_out.linear                                      swapped
double_blocks.*.img_attn.qkv                        transformer_blocks.*.attn.{to_q,to_k,to_v}
double_blocks.*.txt_attn.qkv                        transformer_blocks.*.attn.{add_q_proj,add_k_proj,add_v_proj}
double_blocks.*.{img_attn,txt_attn}.proj            transformer_blocks.*.attn.{to_out.0,to_add_out}
double_blocks.*.img_attn.norm.{query_norm,key_norm}.scale   transformer_blocks.*.attn.{norm_q,norm_k}.weight
double_blocks.*.txt_attn.norm.{query_norm,key_norm}.scale   transformer_blocks.*.attn.{norm_added_q,norm_added_k}.weight
single_blocks.*.norm.{query_norm,key_norm}.scale    single_transformer_blocks.*.attn.{norm_q,norm_k}.weight
"""
_FLUX = """
time_in.{in_layer,out_layer}                        time_text_embed.timestep_embedder.{linear_1,linear_2}
guidance_in.{in_layer,out_layer}                    time_text_embed.guidance_embedder.{linear_1,linear_2}
vector_in.{in_layer,out_layer}                      time_text_embed.text_embedder.{linear_1,linear_2}
double_blocks.*.{img_mod,txt_mod}.lin               transformer_blocks.*.{norm1,norm1_context}.linear
double_blocks.*.img_mlp.{0,2}                       transformer_blocks.*.ff.{net.0.proj,net.2}
double_blocks.*.txt_mlp.{0,2}                       transformer_blocks.*.ff_context.{net.0.proj,net.2}
single_blocks.*.{modulation.lin,linear2}            single_transformer_blocks.*.{norm.linear,proj_out}
single_blocks.*.linear1              single_transformer_blocks.*.{attn.to_q,attn.to_k,attn.to_v,proj_mlp}    1:1:1:4
"""
_FLUX2 = """
time_in.{in_layer,out_layer}                        time_guidance_embed.timestep_embedder.{linear_1,linear_2}
guidance_in.{in_layer,out_layer}                    time_guidance_embed.guidance_embedder.{linear_1,linear_2}
double_stream_modulation_{img,txt}.lin              double_stream_modulation_{img,txt}.linear
single_stream_modulation.lin                        single_stream_modulation.linear
double_blocks.*.img_mlp.{0,2}                       transformer_blocks.*.ff.{linear_in,linear_out}
double_blocks.*.txt_mlp.{0,2}                       transformer_blocks.*.ff_context.{linear_in,linear_out}
single_blocks.*.{linear1,linear2}                   single_transformer_blocks.*.attn.{to_qkv_mlp_proj,to_out}
"""
# (the last block's context has only a shift and a scale)
_SD3 = """
pos_embed                                           pos_embed.pos_embed
x_embedder.proj                                     pos_embed.proj
context_embedder                                    context_embedder
t_embedder.mlp.{0,2}                                time_text_embed.timestep_embedder.{linear_1,linear_2}
y_embedder.mlp.{0,2}                                time_text_embed.text_embedder.{linear_1,linear_2}
final_layer.linear                                  proj_out
final_layer.adaLN_modulation.1                      norm_out.linear                                      swapped
joint_blocks.$.context_block.adaLN_modulation.1     transformer_blocks.$.norm1_context.linear            swapped
joint_blocks.*.x_block.attn.qkv                     transformer_blocks.*.attn.{to_q,to_k,to_v}
joint_blocks.*.x_block.attn2.qkv                    transformer_blocks.*.attn2.{to_q,to_k,to_v}
joint_blocks.*.context_block.attn.qkv               transformer_blocks.*.attn.{add_q_proj,add_k_proj,add_v_proj}
joint_blocks.*.x_block.adaLN_modulation.1           transformer_blocks.*.norm1.linear
joint_blocks.*.x_block.{attn,attn2}.proj            transformer_blocks.*.{attn,attn2}.to_out.0
joint_blocks.*.x_block.attn.{ln_q,ln_k}             transformer_blocks.*.attn.{norm_q,norm_k}
joint_blocks.*.x_block.attn2.{ln_q,ln_k}            transformer_blocks.*.attn2.{norm_q,norm_k}
joint_blocks.*.x_block.mlp.{fc1,fc2}                transformer_blocks.*.ff.{net.0.proj,net.2}
joint_blocks.*.context_block.adaLN_modulation.1     transformer_blocks.*.norm1_context.linear
joint_blocks.*.context_block.attn.{proj,ln_q,ln_k}  transformer_blocks.*.attn.{to_add_out,norm_added_q,norm_added_k}
joint_blocks.*.context_block.mlp.{fc1,fc2}          transformer_blocks.*.ff_context.{net.0.proj,net.2}
"""
_QWEN_IMAGE = """
img_in
txt_in
proj_out
norm_out.linear
time_text_embed.timestep_embedder.{linear_1,linear_2}
transformer_blocks.*.attn.{to_q,to_k,to_v,add_q_proj,add_k_proj,add_v_proj,to_out.0,to_add_out}
transformer_blocks.*.{img,txt}_{mod.1,mlp.net.0.proj,mlp.net.2}
"""
"""Its authors have diffusers' names."""
_Z_IMAGE = """
x_embedder                                          all_x_embedder.2-1
final_layer.{linear,adaLN_modulation.1}             all_final_layer.2-1.{linear,adaLN_modulation.1}
t_embedder.mlp.{0,2}                                t_embedder.mlp.{0,2}
cap_embedder.1                                      cap_embedder.1
"""
_Z_IMAGE_BLOCKS = """
@.*.attention.qkv                                   @.*.attention.{to_q,to_k,to_v}
@.*.attention.{out,q_norm,k_norm}                   @.*.attention.{to_out.0,norm_q,norm_k}
@.*.feed_forward.{w1,w2,w3}                         @.*.feed_forward.{w1,w2,w3}
@.*.adaLN_modulation.0                              @.*.adaLN_modulation.0
"""
_STACKS = ("layers", "noise_refiner", "context_refiner")


def _alternatives(text: str) -> list[str]:
    """Return the texts that ``text`` stands for, by its first braces."""
    head, brace, rest = text.partition("{")
    inside, _, tail = rest.partition("}")
    return [head + each + tail for each in inside.split(",")] if brace else [text]


def _rules(table: str) -> tuple[NameRule, ...]:
    """Return the rules of a table: a line for each original name and diffusers' name, and a transform if any."""
    return tuple(rule for line in table.splitlines() if line for rule in _rules_of(*line.split()))


def _rules_of(original: str, theirs: str, transform: str = "") -> Iterator[NameRule]:
    if "{" in original:
        for one, other in zip(_alternatives(original), _alternatives(theirs), strict=True):
            yield from _rules_of(one, other, transform)
        return
    parts = tuple(_alternatives(theirs))
    usual: Transform = STACKED if len(parts) > 1 else RENAMED
    yield NameRule(original, parts, _TRANSFORMS.get(transform, usual))


class Family(NamedTuple):
    """Names of one kind of network."""

    rules: Rules
    original: tuple[str, ...]
    """Tensors that identify files under its authors' names; empty if those names are ours."""
    ours: tuple[str, ...]
    """Layers that distinguish it from the families after it, by our names."""
    is_original: bool = False
    """Whether our names are its authors', and not diffusers'."""
    adapters_as_diffusers: bool = False
    """Whether kohya's scripts and ComfyUI name adapters as diffusers does, and not as the authors."""
    unused: tuple[str, ...] = ()
    """Tensors in its authors' files that the network does not use."""


DIT_RULES = _rules(_DIT)
WAN_BLOCK = tuple(rule.diffusers[0].removeprefix("blocks.*.") for rule in _rules(_WAN_LAYERS))
"""Linear layers of a block of Wan, by diffusers' names."""
FAMILIES: Mapping[str, Family] = {
    "dit": Family(DIT_RULES, (), ("blocks.0.attn.qkv",), is_original=True),
    "wan": Family(
        _rules(_WAN_ENDS + _WAN_LAYERS + _WAN_OTHERS),
        ("patch_embedding.weight", "time_embedding.0.weight"),
        ("blocks.0.attn1.to_q",),
    ),
    "flux": Family(
        _rules(_BOTH_FLUX + _FLUX),
        ("vector_in.in_layer.weight", "double_blocks.0.img_attn.qkv.weight"),
        ("single_transformer_blocks.0.proj_mlp",),
    ),
    "flux2": Family(
        _rules(_BOTH_FLUX + _FLUX2),
        ("single_stream_modulation.lin.weight", "double_blocks.0.img_attn.qkv.weight"),
        ("single_transformer_blocks.0.attn.to_qkv_mlp_proj",),
    ),
    "qwen_image": Family(
        _rules("".join(f"{name} {name}\n" for name in _QWEN_IMAGE.split())),
        (),
        ("transformer_blocks.0.txt_mod.1",),
    ),
    "sd3": Family(
        _rules(_SD3), ("joint_blocks.0.x_block.attn.qkv.weight",), ("transformer_blocks.0.norm1_context.linear",)
    ),
    "z_image": Family(
        _rules(_Z_IMAGE + "".join(_Z_IMAGE_BLOCKS.replace("@", stack) for stack in _STACKS)),
        ("cap_pad_token", "layers.0.attention.qkv.weight"),
        ("cap_embedder.1",),
        adapters_as_diffusers=True,
        unused=("norm_final.weight",),
    ),
}
"""By ``model_id``; a layer of several families is the same one."""
_MIN_FRACTION = 0.9
"""Fraction of a file's tensors that must have a family's names, for a file without the family's identifying tensor."""


def from_original(weights: Mapping[str, np.ndarray]) -> Arrays:
    """Return ``weights`` by the names used here if they have those of a network's authors; others stay as they are."""
    for family in FAMILIES.values():
        if family.original and weights.keys() >= set(family.original):
            used = {name: array for name, array in weights.items() if name not in family.unused}
            return to_diffusers(used, family.rules)
    return dict(weights)


def incomplete_family(names: Collection[str]) -> tuple[str, str] | None:
    """Return the family of a file with these ``names`` and its identifying tensor, if that is missing.

    None: no such tensor is missing, or the file is of no known family.
    """
    candidates = []
    for kind, family in FAMILIES.items():
        numbered = [*expand_rules(family.rules, numbers_in(names))]
        for layers in ([rule.original for rule in numbered], [name for rule in numbered for name in rule.diffusers]):
            known = {layer + leaf for layer in layers for leaf in LEAVES}
            candidates.append((len(known.intersection(names)), kind, known))
    count, kind, known = max(candidates, key=lambda candidate: candidate[0])
    family = FAMILIES[kind]
    identifying = (*family.original, *(f"{layer}.weight" for layer in family.ours))
    missing = [name for name in identifying if name in known and name not in names]
    is_sure = count >= _MIN_FRACTION * len(names) or any(name in names for name in family.original)
    return (kind, missing[0]) if missing and is_sure else None


def to_original_names(weights: Mapping[str, np.ndarray], family: Family) -> Arrays:
    """Return the weights of a ``family``'s network by the names that its authors gave them."""
    return dict(weights) if family.is_original else to_original(weights, family.rules)


def family_of(layers: Collection[str]) -> Family | None:
    """Return the family of a network with these linear ``layers``; None if it is another one."""
    known = set(layers)
    return next((family for family in FAMILIES.values() if known >= set(family.ours)), None)
