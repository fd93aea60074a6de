"""How other programs name the layers that have adapters.

    here, Wan         blocks.0.attn1.to_q             here, DiT            blocks.0.attn.qkv
    diffusers         blocks.0.attn1.to_q             diffusers, peft      transformer_blocks.0.attn1.to_q, to_k, to_v
    Wan's own code    blocks.0.self_attn.q            facebookresearch     blocks.0.attn.qkv
    MindSpeed-MM      blocks.0.self_attn.proj_q

A prefix before them tells whose names they are. kohya's sd-scripts and musubi-tuner write all dots as underscores.
ComfyUI and musubi-tuner know the names of Wan's own code.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from mindspeed_mm_dit.checkpoint import rules
from mindspeed_mm_dit.checkpoint.lora.adapter import LowRank, blocks_in, cut, joined
from mindspeed_mm_dit.checkpoint.wan_names import WAN_BLOCK, WAN_ENDS
from mindspeed_mm_dit.errors import CheckpointError, nearest

_MINDSPEED_MM = {"q": "proj_q", "k": "proj_k", "v": "proj_v", "o": "proj_out"}
PREFIXES = (
    "base_model.model.", "model.diffusion_model.", "diffusion_model.", "transformer.", "predictor.", "model.",
    "module.", "lora_unet_", "lora_transformer_", "",
)  # fmt: skip
MOST_BLOCKS = 10_000


class Place(NamedTuple):
    """The layer here, or the part of one, that a name in a file stands for."""

    layer: str
    part: int = 0
    of: int = 1
    """If the layer is several matrices there: which of them it is, and of how many."""


def native_name(layer: str) -> str:
    """Return the name of a layer in the code of the network's authors."""
    number = re.match(r"blocks\.\d+\.", layer)
    stem = number[0] if number else ""
    rest = layer.removeprefix(stem)
    return f"{stem}{WAN_BLOCK[rest]}" if stem and rest in WAN_BLOCK else WAN_ENDS.get(layer, layer)


def diffusers_names(layer: str, blocks: int) -> tuple[str, ...]:
    """Return diffusers' name of a layer in a network of ``blocks`` blocks, or one name for each matrix in it."""
    return _of_dit(blocks).get(layer, (layer,))


def _of_dit(blocks: int) -> dict[str, tuple[str, ...]]:
    """Map DiT's layers to diffusers' names; those that diffusers repeats in every block are left out."""
    found: dict[str, tuple[str, ...]] = {}
    for rule in rules.LAYERS:
        numbers = range(blocks) if "*" in rule.published else range(1)
        if rule.transform is not rules.REPEATED:
            found |= {
                rule.published.replace("*", str(i)): tuple(d.replace("*", str(i)) for d in rule.diffusers)
                for i in numbers
            }
    return found


class Names:
    """Finds the layer that a name in a file stands for, in any program's naming.

    layers: those of the network, if it is known; else every layer of a DiT and of a Wan with as many blocks as the
    names in the file (``spoken``) have.
    """

    def __init__(self, spoken: Iterable[str], layers: Iterable[str] | None) -> None:
        spoken = list(spoken)
        self.blocks = blocks_in(spoken if layers is None else (layers := list(layers)))
        if self.blocks > MOST_BLOCKS:
            raise CheckpointError("the adapter", f"names {self.blocks:,} blocks", "copy or download it again")
        self._dotted: dict[str, Place] = {}
        known = self._usual() if layers is None else layers
        for layer in known:
            native = native_name(layer)
            theirs = [layer, native, _mindspeed_mm(native)]
            self._dotted |= dict.fromkeys(theirs, Place(layer))
            parts = diffusers_names(layer, self.blocks)
            self._dotted |= {name: Place(layer, i, len(parts)) for i, name in enumerate(parts)}
        self._underscored = {name.replace(".", "_"): place for name, place in self._dotted.items()}

    def _usual(self) -> list[str]:
        blocks = [f"blocks.{i}.{name}" for i in range(self.blocks) for name in WAN_BLOCK]
        return [*blocks, *WAN_ENDS, *_of_dit(self.blocks)]

    def place(self, name: str, where: str) -> Place:
        """Return the layer that ``name``, with any of the prefixes, stands for.

        Raises CheckpointError if the network has no such layer.
        """
        for prefix in PREFIXES:
            if name.startswith(prefix):
                known = self._underscored if prefix.endswith("_") else self._dotted
                if (found := known.get(name[len(prefix) :])) is not None:
                    return found
        names = [*self._dotted] if "." in name else [*self._underscored]
        short = next(name[len(prefix) :] for prefix in PREFIXES if name.startswith(prefix))
        raise CheckpointError(
            where, f"has an adapter for {name}, which is no linear layer of this network",
            f"{nearest(short, names)}name the adapters of this base",
        )  # fmt: skip


def _mindspeed_mm(native: str) -> str:
    stem, _, last = native.rpartition(".")
    return f"{stem}.{_MINDSPEED_MM[last]}" if stem.endswith("_attn") else native


def to_ours(theirs: Mapping[str, LowRank], layers: Iterable[str] | None, where: str) -> dict[str, LowRank]:
    """Rename adapters from the names of any program to ours; see :class:`Names` for ``layers``."""
    names = Names(theirs, layers)
    found: dict[str, dict[Place, LowRank]] = {}
    for name, own in theirs.items():
        place = names.place(name, where)
        if place in found.setdefault(place.layer, {}):
            raise CheckpointError(where, f"has two adapters for {place.layer}", "keep one of them")
        found[place.layer][place] = own
    return {layer: _joined(parts) for layer, parts in found.items()}


def _joined(parts: Mapping[Place, LowRank]) -> LowRank:
    (layer, _, count), height = next(iter(parts)), next(iter(parts.values())).up.shape[0]
    return joined([parts.get(Place(layer, i, count)) for i in range(count)], [height] * count)


def to_diffusers(ours: Mapping[str, LowRank]) -> dict[str, LowRank]:
    """Rename adapters to diffusers' names; a matrix that is several there is split."""
    found: dict[str, LowRank] = {}
    blocks = blocks_in(ours)
    for layer, own in ours.items():
        names = diffusers_names(layer, blocks)
        found |= {name: part for name, part in zip(names, cut(own, len(names))) if part is not None}
    return found


def to_native(ours: Mapping[str, LowRank]) -> dict[str, LowRank]:
    """Rename adapters to the names in the code of the networks' authors."""
    return {native_name(layer): own for layer, own in ours.items()}
