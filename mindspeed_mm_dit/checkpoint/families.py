"""The families of networks: which names their authors' files have, and how they become ours."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np

from mindspeed_mm_dit.checkpoint import rules
from mindspeed_mm_dit.checkpoint.dit_names import DIT_RULES
from mindspeed_mm_dit.checkpoint.joint_names import (
    FLUX2_RULES,
    FLUX_RULES,
    QWEN_IMAGE_RULES,
    SD3_RULES,
    Z_IMAGE_RULES,
)
from mindspeed_mm_dit.checkpoint.rules import Arrays, Rules
from mindspeed_mm_dit.checkpoint.wan_names import WAN_RULES

_MIN_FRACTION = 0.9
"""Fraction of a file's tensors that must have a family's names, for a file without the family's identifying tensor."""


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


FAMILIES: Mapping[str, Family] = {
    "dit": Family(DIT_RULES, (), ("blocks.0.attn.qkv",), is_original=True),
    "wan": Family(WAN_RULES, ("patch_embedding.weight", "time_embedding.0.weight"), ("blocks.0.attn1.to_q",)),
    "flux": Family(
        FLUX_RULES, ("vector_in.in_layer.weight", "double_blocks.0.img_attn.qkv.weight"),
        ("single_transformer_blocks.0.proj_mlp",),
    ),
    "flux2": Family(
        FLUX2_RULES, ("single_stream_modulation.lin.weight", "double_blocks.0.img_attn.qkv.weight"),
        ("single_transformer_blocks.0.attn.to_qkv_mlp_proj",),
    ),
    "qwen_image": Family(QWEN_IMAGE_RULES, (), ("transformer_blocks.0.txt_mod.1",)),
    "sd3": Family(
        SD3_RULES, ("joint_blocks.0.x_block.attn.qkv.weight",), ("transformer_blocks.0.norm1_context.linear",)
    ),
    "z_image": Family(
        Z_IMAGE_RULES, ("cap_pad_token", "layers.0.attention.qkv.weight"), ("cap_embedder.1",),
        adapters_as_diffusers=True, unused=("norm_final.weight",),
    ),
}  # fmt: skip
"""By ``model_id``; a layer of several families is the same one."""


def from_original(weights: Mapping[str, np.ndarray]) -> Arrays:
    """Return ``weights`` by the names used here if they have those of a network's authors; others stay as they are."""
    for family in FAMILIES.values():
        if family.original and weights.keys() >= set(family.original):
            used = {name: array for name, array in weights.items() if name not in family.unused}
            return rules.to_diffusers(used, family.rules)
    return dict(weights)


def lacking(names: Collection[str]) -> tuple[str, str] | None:
    """Return the family of a file with these ``names`` and its identifying tensor, if that is missing.

    None: no such tensor is missing, or the file is of no known family.
    """
    candidates = []
    for kind, family in FAMILIES.items():
        numbered = [*rules.numbered(family.rules, rules.numbers_in(names))]
        for layers in ([rule.original for rule in numbered], [name for rule in numbered for name in rule.diffusers]):
            known = {layer + leaf for layer in layers for leaf in rules.LEAVES}
            candidates.append((len(known.intersection(names)), kind, known))
    count, kind, known = max(candidates, key=lambda candidate: candidate[0])
    family = FAMILIES[kind]
    identifying = (*family.original, *(f"{layer}.weight" for layer in family.ours))
    missing = [name for name in identifying if name in known and name not in names]
    is_sure = count >= _MIN_FRACTION * len(names) or any(name in names for name in family.original)
    return (kind, missing[0]) if missing and is_sure else None


def in_original_names(weights: Mapping[str, np.ndarray], family: Family) -> Arrays:
    """Return the weights of a ``family``'s network by the names that its authors gave them."""
    return dict(weights) if family.is_original else rules.to_original(weights, family.rules)


def family_of(layers: Collection[str]) -> Family | None:
    """Return the family of a network with these linear ``layers``; None if it is another one."""
    known = set(layers)
    return next((family for family in FAMILIES.values() if known >= set(family.ours)), None)
