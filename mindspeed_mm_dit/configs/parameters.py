"""The parameters of a network, by name: shape, initial value, and whether each is trained and saved.

A network declares them with its layers (``framework/contract.py``). Plans, checkpoints, initial weights and adapters
read them here, without a framework.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np

Shape = tuple[int, ...]


class Initial(Enum):
    """How a parameter is initialised; ``models/init.py`` does it."""

    ZEROS = "zeros"
    ONES = "ones"
    XAVIER_UNIFORM = "xavier_uniform"
    """Glorot & Bengio 2010, eq. 16; axes past the second count as inputs."""


ZEROS, ONES, XAVIER_UNIFORM = Initial


@dataclass(frozen=True)
class Normal:
    """Initialisation by a normal distribution of mean 0."""

    std: float


Rule = Initial | Normal | Callable[[np.random.Generator, Shape], np.ndarray]
"""How to initialise. A function, for anything else, gets a generator and the shape; for a parameter that is not
trained it must be deterministic."""


@dataclass(frozen=True)
class Parameter:
    """One tensor of a network."""

    shape: Shape
    initial: Rule = ZEROS
    trained: bool = True
    """Whether it is trained. If not, it keeps its initial value, and is still saved."""
    saved: bool = True
    """Whether checkpoints contain it. If not, it belongs to a frozen base model, of which they store a digest."""
    matrices: int = 0
    """Number of matrices fused in it, e.g. 3 for q, k and v in one layer; 0 for a vector, a table, a filter, or the
    last layer. Muon orthogonalises each matrix separately."""


@dataclass(frozen=True)
class Parameters(Mapping[str, Parameter]):
    """All parameters of a network by their names in a checkpoint, in the order of the network."""

    by_name: Mapping[str, Parameter]
    blocks: tuple[str, ...] = ()
    """Names of the network's blocks, "blocks.0", "blocks.1", ... Sharded weights are gathered block by block."""

    def __getitem__(self, name: str) -> Parameter:
        return self.by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_name)

    def __len__(self) -> int:
        return len(self.by_name)

    def shapes(self, trained_only: bool = False, saved_only: bool = False) -> dict[str, Shape]:
        """Return the shape of each parameter, by its name."""
        return {
            name: p.shape for name, p in self.items() if (p.trained or not trained_only) and (p.saved or not saved_only)
        }

    def num_elements(self, shards: int = 1, trained_only: bool = False) -> int:
        """Return the number of elements on the fullest of ``shards`` ranks."""
        return count((p for p in self.values() if p.trained or not trained_only), shards)

    @property
    def block_prefixes(self) -> tuple[str, ...]:
        """Names of the lists of blocks: "blocks"; some networks have several."""
        return tuple(dict.fromkeys(block.rpartition(".")[0] for block in self.blocks))

    def block_of(self, name: str) -> str:
        """Return the name of the block that parameter ``name`` belongs to; empty if it is in none."""
        prefix = next((prefix for prefix in self.block_prefixes if name.startswith(f"{prefix}.")), None)
        return f"{prefix}.{name[len(prefix) + 1 :].partition('.')[0]}" if prefix else ""

    def by_block(self) -> dict[str, list[Parameter]]:
        """Return the parameters of each block by its name, and those outside of all blocks under ""."""
        parameters: dict[str, list[Parameter]] = {"": [], **{block: [] for block in self.blocks}}
        for name, p in self.items():
            parameters[self.block_of(name)].append(p)
        return parameters


def count(parameters: Iterable[Parameter], shards: int = 1) -> int:
    """Return the elements on the fullest of ``shards`` ranks: FSDP2 splits the first axis evenly, rounded up."""
    return sum(-(-p.shape[0] // shards) * math.prod(p.shape[1:]) for p in parameters)
