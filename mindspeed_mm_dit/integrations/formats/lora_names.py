"""How other programs name the layers that have adapters.

    here, Wan         blocks.0.attn1.to_q             here, DiT          blocks.0.attn.qkv
    diffusers         blocks.0.attn1.to_q             diffusers, peft    transformer_blocks.0.attn1.to_q, to_k, to_v
    Wan's own code    blocks.0.self_attn.q            facebookresearch   blocks.0.attn.qkv
    MindSpeed-MM      blocks.0.self_attn.proj_q

    here, FLUX        transformer_blocks.0.attn.to_q, to_k, to_v
    diffusers         transformer_blocks.0.attn.to_q, to_k, to_v
    FLUX's own code   double_blocks.0.img_attn.qkv

A prefix shows which program wrote a name. kohya's sd-scripts and musubi-tuner write all dots as underscores.
ComfyUI and musubi-tuner know the names of the authors' own code.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mindspeed_mm_dit.checkpoint.lora import LowRank
from mindspeed_mm_dit.errors import CheckpointError, ConfigError, nearest
from mindspeed_mm_dit.integrations.formats.families import (
    FAMILIES,
    RENAMED,
    REPEATED,
    STACKED,
    Family,
    NameRule,
    Transform,
    block_ranges,
    expand_rules,
    family_of,
    numbers_in,
)

_MINDSPEED_MM = {"q": "proj_q", "k": "proj_k", "v": "proj_v", "o": "proj_out"}
PREFIXES = (
    "base_model.model.",
    "model.diffusion_model.",
    "diffusion_model.",
    "transformer.",
    "predictor.",
    "model.",
    "module.",
    "lora_unet_",
    "lora_transformer_",
    "lycoris_",
    "",
)
MAX_BLOCKS = 10_000


class LayerTarget(NamedTuple):
    """What a name in a file stands for."""

    layers: tuple[str, ...]
    """The layer here, or all that are one matrix there."""
    part: int = 0
    num_parts: int = 1
    """If the layer is several matrices there: which of them it is, and of how many."""
    transform: Transform = RENAMED
    """How several matrices make one."""


LayerTargets = Mapping[str, LayerTarget]
"""By the names of any program, without prefix."""


def _family_targets(family: Family, numbers: Mapping[str, Sequence[int]]) -> dict[str, LayerTarget]:
    """Return all names of the layers of a ``family``'s network with these blocks."""
    targets: dict[str, LayerTarget] = {}
    for original, theirs, transform in _with_adapters(family, numbers):
        ours = (original,) if family.is_original else theirs
        targets |= {layer: LayerTarget((layer,)) for layer in ours}
        if family.is_original:
            targets |= {name: LayerTarget(ours, i, len(theirs), transform) for i, name in enumerate(theirs)}
        else:
            names = {original, _mindspeed_mm(original)} - targets.keys()
            targets |= dict.fromkeys(names, LayerTarget(ours, transform=transform))
    return _with_underscores(targets)


def _with_underscores(known: LayerTargets) -> dict[str, LayerTarget]:
    return {**{name.replace(".", "_"): target for name, target in known.items()}, **known}


def _with_adapters(family: Family, numbers: Mapping[str, Sequence[int]]) -> Iterable[NameRule]:
    return (rule for rule in expand_rules(family.rules, numbers) if rule.transform is not REPEATED)


def _mindspeed_mm(native: str) -> str:
    prefix, _, last = native.rpartition(".")
    return f"{prefix}.{_MINDSPEED_MM.get(last, last)}" if prefix.endswith("_attn") else native


def _targets_in_network(layers: Collection[str]) -> LayerTargets:
    """Return all names of the ``layers`` of a network."""
    family, known = family_of(layers), set(layers)
    named = _family_targets(family, numbers_in(layers)) if family else {}
    our_names = _with_underscores({layer: LayerTarget((layer,)) for layer in layers})
    return our_names | {name: target for name, target in named.items() if known.issuperset(target.layers)}


def _targets_in_best_family(loras: Mapping[str, LowRank], where: str) -> LayerTargets:
    """Return the names of the family whose network has all layers of a file, with as many blocks as they have.

    Raises CheckpointError if several families have them, and mean different layers.
    """
    candidates = _names_by_family(loras)
    certainty = [_count_matching_heights(known, loras) for known in candidates]
    best = [known for known, sure in zip(candidates, certainty) if sure == max(certainty)]
    if max(certainty) >= 0 and len({tuple(_find(known, name) for name in loras) for known in best}) > 1:
        raise CheckpointError(
            f"{where} has layer names that several networks share, so its network is ambiguous. Give its model.json by "
            "--model."
        )
    return best[0] if max(certainty) >= 0 else {name: target for known in candidates for name, target in known.items()}


def _count_matching_heights(known: LayerTargets, loras: Mapping[str, LowRank]) -> int:
    """Return how many joined matrices of a file have the height that a family's have; -1 if it is not of that family.

    Queries, keys and values are as high as they are wide, in every family.
    """
    sure = 0
    for name, lora in loras.items():
        target = _find(known, name)
        height = sum(target.transform.heights) * lora.down.shape[1] if target else 0
        if target is None or (len(target.layers) > 1 and len(lora.up) != height):
            return -1
        sure += len(target.layers) > 1
    return sure


def _names_by_family(names: Collection[str]) -> list[LayerTargets]:
    """Return the names of every family's network with as many blocks as ``names`` have."""
    if (blocks := count_blocks(names)) > MAX_BLOCKS:
        raise CheckpointError(f"The adapters name {blocks:,} blocks, more than any network has. Copy the file again.")
    return [_family_targets(family, block_ranges(family.rules, blocks)) for family in FAMILIES.values()]


def _find(known: LayerTargets, name: str) -> LayerTarget | None:
    """Return what ``name``, with any of the prefixes, stands for."""
    for prefix in PREFIXES:
        if name.startswith(prefix) and (target := known.get(name[len(prefix) :])) is not None:
            return target
    return None


def to_ours(theirs: Mapping[str, LowRank], layers: Iterable[str] | None, where: str) -> dict[str, LowRank]:
    """Rename adapters from the names of any program to ours.

    layers: those of the network, if it is known. Raises CheckpointError if it has no such layer.
    """
    known = _targets_in_best_family(theirs, where) if layers is None else _targets_in_network(list(layers))
    parts_by_layer: dict[str, dict[int, LowRank]] = {}
    targets: dict[str, LayerTarget] = {}
    for name, lora in theirs.items():
        target = _find(known, name)
        if target is None:
            raise _unknown_layer_error(name, known, where)
        for layer, piece in zip(target.layers, _split_by_layer(lora, target, f"{where}: {name}")):
            parts, first_target = parts_by_layer.setdefault(layer, {}), targets.setdefault(layer, target)
            if target.part in parts or target.num_parts != first_target.num_parts:
                raise CheckpointError(f"{where} has two adapters for {layer}. Keep one of them.")
            if piece is not None:
                parts[target.part] = piece
    return {layer: _joined(parts, targets[layer]) for layer, parts in parts_by_layer.items() if parts}


def _unknown_layer_error(name: str, known: LayerTargets, where: str) -> CheckpointError:
    names = [other for other in known if ("." in other) == ("." in name)] or [*known]
    short = next(name[len(prefix) :] for prefix in PREFIXES if name.startswith(prefix))
    return CheckpointError(
        f"{where} has an adapter for {name}, which is no linear layer of this network. {nearest(short, names)}Name "
        "adapters of this network."
    )


def _split_by_layer(lora: LowRank, target: LayerTarget, what: str) -> list[LowRank | None]:
    """Return the adapter of each layer of ``target``; if ``target`` is a part of one layer, the adapter itself."""
    if target.num_parts > 1:
        return [lora]
    if len(lora.up) % sum(target.transform.heights):
        raise CheckpointError(
            f"{what} has {len(lora.up)} rows, which {len(target.layers)} layers cannot share. Name those of this "
            "network."
        )
    return split_adapter(lora, len(target.layers), target.transform)


def _joined(parts: Mapping[int, LowRank], target: LayerTarget) -> LowRank:
    return (
        parts[0] if target.num_parts == 1 else joined([parts.get(i) for i in range(target.num_parts)], target.transform)
    )


def to_diffusers(ours: Mapping[str, LowRank]) -> dict[str, LowRank]:
    """Rename adapters to diffusers' names; a matrix that is several there is split."""
    renamed: dict[str, LowRank] = {}
    for layer, (_, names, transform) in diffusers_rules(ours).items():
        parts = split_adapter(ours[layer], len(names), transform)
        renamed |= {name: part for name, part in zip(names, parts) if part is not None}
    return renamed


def diffusers_rules(layers: Collection[str]) -> dict[str, NameRule]:
    """Return the rule for each of our layers that makes it diffusers'."""
    families = [family for family in FAMILIES.values() if family.is_original]
    rules = [rule for family in families for rule in _with_adapters(family, numbers_in(layers))]
    rule_by_layer = {rule.original: rule for rule in rules}
    return {layer: rule_by_layer.get(layer, NameRule(layer, (layer,))) for layer in layers}


def to_native(ours: Mapping[str, LowRank], layers: Collection[str] = ()) -> dict[str, LowRank]:
    """Rename adapters to the names that kohya's scripts and ComfyUI take, mostly those of the networks' authors.

    layers: those of the network, if it is known. Raises ConfigError if it is not, and several networks have these.
    """
    numbers = numbers_in(layers or ours)
    candidates = [
        _renamed_to_native(ours, family, numbers)
        for family in ([family_of(layers)] if layers else _families_with(ours))
    ]
    if any(other.keys() != candidates[0].keys() for other in candidates):
        raise ConfigError(
            "--model is needed: several networks have layers of these names, and their authors name them differently. "
            "Give the model.json of the adapters' base."
        )
    return candidates[0]


def _families_with(ours: Mapping[str, LowRank]) -> list[Family | None]:
    """Return the families whose networks have all these layers; None is a network of another kind."""
    fitting = zip(FAMILIES.values(), _names_by_family(ours))
    families = [family for family, known in fitting if all(known.get(layer) == LayerTarget((layer,)) for layer in ours)]
    return [*families] or [None]


def _renamed_to_native(
    ours: Mapping[str, LowRank], family: Family | None, numbers: Mapping[str, Sequence[int]]
) -> dict[str, LowRank]:
    if family is None or family.is_original or family.adapters_as_diffusers:
        return dict(ours)
    remaining, renamed = dict(ours), {}
    for rule in expand_rules(family.rules, numbers):
        parts = [remaining.pop(name, None) for name in rule.diffusers]
        if any(part is not None for part in parts):
            renamed[rule.original] = joined(parts, rule.transform)
    return {**renamed, **remaining}


# --- layers that are one matrix here and several elsewhere, or the other way round ------------------------------------


def joined(parts: Sequence[LowRank | None], transform: Transform = STACKED) -> LowRank:
    """Return one adapter for the matrix that ``transform`` makes, given the adapter of each (None: it has none).

    If all share A, A stays as it is. Otherwise the A are stacked as well, and B has a block for each.
    """
    present = [part for part in parts if part is not None]
    first = present[0]
    is_shared = len(present) == len(parts) and all(
        part.alpha == first.alpha and part.down.tobytes() == first.down.tobytes() for part in present
    )
    if is_shared:
        return LowRank(first.down, transform.join([part.up for part in present]), first.alpha)
    alike = all(part.scale == first.scale for part in present)
    folded = [None if part is None else part if alike else part.with_unit_scale() for part in parts]
    unit = next(len(part.up) // height for part, height in zip(parts, transform.heights) if part is not None)
    rows = transform.split(np.arange(unit * sum(transform.heights)), len(parts))
    rank = sum(part.rank for part in present)
    up, column = np.zeros((sum(map(len, rows)), rank), first.up.dtype), 0
    for part, part_rows in zip(folded, rows):
        if part is not None:
            up[part_rows, column : column + part.rank] = part.up
            column += part.rank
    downs = [part.down for part in folded if part is not None]
    return LowRank(np.concatenate(downs), up, (first.scale if alike else 1.0) * rank)


def split_adapter(lora: LowRank, count: int, transform: Transform = STACKED) -> list[LowRank | None]:
    """Undo :func:`joined` for ``count`` matrices: each keeps the rows of A that its part of B uses."""
    parts = transform.split(lora.up, count)
    if count == 1:
        return [LowRank(lora.down, parts[0], lora.alpha)]
    pieces: list[LowRank | None] = []
    for up in parts:
        used = up.any(axis=0)
        if not used.any() and lora.up.any():
            pieces.append(None)
            continue
        ranks = used if used.any() else np.ones_like(used)
        pieces.append(LowRank(lora.down[ranks], up[:, ranks], lora.scale * int(ranks.sum())))
    return pieces


def count_blocks(names: Iterable[str]) -> int:
    """Return the number of blocks in ``names``: one more than the largest block number."""
    numbers = [int(number) for name in names for number in re.findall(r"(?:blocks|layers|refiner)[._](\d+)[._]", name)]
    return max(numbers, default=-1) + 1
