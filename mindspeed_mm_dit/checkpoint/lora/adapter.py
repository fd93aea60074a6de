"""Low-rank adapters (LoRA) as arrays: what they add to the weights of a network."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from mindspeed_mm_dit.checkpoint.rules import STACKED, Transform
from mindspeed_mm_dit.configs.tuning import DOWN, UP, LoraSpec
from mindspeed_mm_dit.errors import CheckpointError, nearest

Arrays = dict[str, np.ndarray]


class LowRank(NamedTuple):
    """The adapter of one layer, whose weight W (out, in) becomes W + alpha / r B A (Hu et al. 2021, eq. 3)."""

    down: np.ndarray
    """A, (r, in)."""
    up: np.ndarray
    """B, (out, r)."""
    alpha: float

    @property
    def rank(self) -> int:
        """The rank r."""
        return int(self.down.shape[0])

    @property
    def scale(self) -> float:
        """The factor of B A: alpha / r."""
        return self.alpha / self.rank

    def change(self, strength: float = 1.0) -> np.ndarray:
        """Return what is added to the weight, (out, in) float32."""
        return np.float32(strength * self.scale) * (self.up.astype(np.float32) @ self.down.astype(np.float32))

    def folded(self) -> LowRank:
        """Return an equal adapter with alpha = r: A and B each hold the root of the scale, and B its sign."""
        root = np.float32(abs(self.scale) ** 0.5)
        signed = root * np.float32(np.sign(self.scale))
        return self if self.scale == 1 else LowRank(self.down * root, self.up * signed, float(self.rank))


@dataclass(frozen=True)
class Adapter:
    """The adapters of some layers of a network."""

    layers: Mapping[str, LowRank]
    """By our name of the layer."""
    where: str = "the adapter"
    """The name used in errors."""
    notes: tuple[str, ...] = field(default=())
    """What was assumed when it was read, a sentence each."""

    def specs(self) -> dict[str, LoraSpec]:
        """Return rank and scale of each layer's adapter, as needed to build the network with them."""
        return {name: LoraSpec(lora.rank, lora.scale) for name, lora in self.layers.items()}

    def arrays(self) -> Arrays:
        """Return A and B of all layers by their names in a network."""
        named = {f"{name}.{DOWN}.weight": lora.down for name, lora in self.layers.items()}
        return named | {f"{name}.{UP}.weight": lora.up for name, lora in self.layers.items()}

    def merged(self, weights: Mapping[str, np.ndarray], strength: float = 1.0) -> Arrays:
        """Return ``weights`` with ``strength`` times this adapter merged in, in their own dtypes.

        Raises CheckpointError, naming the layer, if these are the weights of another network.
        """
        self.check_fits({name: array.shape for name, array in weights.items()})
        return dict(weights) | {
            name: (weights[name].astype(np.float32) + lora.change(strength)).astype(weights[name].dtype)
            for layer, lora in self.layers.items() for name in (f"{layer}.weight",)
        }  # fmt: skip

    def check_fits(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise CheckpointError, naming the layer, unless a network of ``shapes`` has every layer."""
        for layer, lora in self.layers.items():
            actual = shapes.get(f"{layer}.weight")
            expected = (lora.up.shape[0], lora.down.shape[1])
            if actual is None or tuple(actual) != expected:
                reason = "is not in this network" if actual is None else f"is {tuple(actual)} in this network"
                names = [name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) == 2]
                raise CheckpointError(
                    f"{self.where}: an adapter for {layer}, of a weight {expected}",
                    reason,
                    f"{nearest(layer, names) if actual is None else ''}name the adapters of this base",
                )


def adapter_from_arrays(arrays: Mapping[str, np.ndarray], alpha: float, where: str) -> Adapter:
    """Return the adapter of arrays named as in a network (the inverse of :meth:`Adapter.arrays`)."""
    layers = [name.removesuffix(f".{DOWN}.weight") for name in arrays if name.endswith(f".{DOWN}.weight")]
    loras = {n: LowRank(arrays[f"{n}.{DOWN}.weight"], arrays[f"{n}.{UP}.weight"], alpha) for n in layers}
    return Adapter(loras, where)


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
    folded = [None if part is None else part if alike else part.folded() for part in parts]
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


def cut(lora: LowRank, count: int, transform: Transform = STACKED) -> list[LowRank | None]:
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


def blocks_in(names: Iterable[str]) -> int:
    """Return the number of blocks in ``names``: one more than the largest block number."""
    numbers = [int(number) for name in names for number in re.findall(r"(?:blocks|layers|refiner)[._](\d+)[._]", name)]
    return max(numbers, default=-1) + 1
