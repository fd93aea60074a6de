"""What the other rooms ask of a predictor: its parameters, its arithmetic, and what it keeps in memory.

A predictor is a config class that answers here, without a framework, and a network that has just these parameters;
``models/registry.py`` joins them. Plan, checkpoints, initial weights and hosts ask the config, never the network.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.condition import Conditions
from mindspeed_mm_dit.errors import CheckpointError, ConfigError

Shape = tuple[int, ...]


class Initial(Enum):
    """How a parameter begins; ``models/init.py`` draws it."""

    ZEROS = "zeros"
    ONES = "ones"
    XAVIER_UNIFORM = "xavier_uniform"
    """Glorot & Bengio 2010, eq. 16; axes past the second count as inputs."""
    SINCOS_2D = "sincos_2d"
    """DiT's code of positions on a square grid; the shape is (1, tokens, width)."""


@dataclass(frozen=True)
class Normal:
    """Drawn from a normal distribution of mean 0."""

    std: float


Rule = Initial | Normal | Callable[[np.random.Generator, Shape], np.ndarray]
"""The last kind: a function of a generator of its own and the shape, for what the others cannot say."""


@dataclass(frozen=True)
class Parameter:
    """One tensor of a network."""

    shape: Shape
    initial: Rule = Initial.ZEROS
    trained: bool = True
    """Whether it has a gradient; else it is saved all the same, and keeps its initial value."""
    saved: bool = True
    """Whether checkpoints hold it; else it is one of a frozen base, whose digest they keep."""
    matrices: int = 0
    """How many matrices it is, one below the other, as of q, k and v in one layer; 0: a vector, a table, a filter, or
    the last layer. Some optimizers (Muon) step matrices as such."""


@dataclass(frozen=True)
class Parameters:
    """Every parameter of a network. Its blocks are alike, and one at a time is gathered where weights are sharded."""

    before: Mapping[str, Parameter]
    """Ahead of the blocks, by name."""
    block: Mapping[str, Parameter]
    """One block, by name within it."""
    num_blocks: int
    after: Mapping[str, Parameter] = field(default_factory=dict)
    """Behind the blocks, by name."""
    stem: str = "blocks"
    """Block i is called "stem.i"."""
    others: Mapping[str, Parameter] = field(default_factory=dict)
    """What single blocks have otherwise than ``block`` says, or besides, by its name in a checkpoint."""

    def __iter__(self) -> Iterator[tuple[str, Parameter]]:
        """Yield (name in a checkpoint, parameter), in the order of the network."""
        yield from self.before.items()
        for i in range(self.num_blocks):
            own = {f"{self.stem}.{i}.{name}": parameter for name, parameter in self.block.items()}
            yield from ((name, self.others.get(name, parameter)) for name, parameter in own.items())
        yield from ((name, parameter) for name, parameter in self.others.items() if not self._of_block(name))
        yield from self.after.items()

    def _of_block(self, name: str) -> Parameter | None:
        """Return what every block has by the end of ``name``."""
        return self.block.get(name.removeprefix(f"{self.stem}.").partition(".")[2])

    def shapes(self, trained_only: bool = False, saved_only: bool = False) -> dict[str, Shape]:
        """Return the shape of each by its name in a checkpoint."""
        return {
            name: p.shape for name, p in self if (p.trained or not trained_only) and (p.saved or not saved_only)
        }  # fmt: skip

    def total(self, of: Callable[[Parameter], int]) -> int:
        """Return the sum of a number that each parameter has, however many blocks there are."""
        blocks = self.num_blocks * sum(map(of, self.block.values()))
        others = sum(of(p) - (of(common) if (common := self._of_block(name)) else 0) for name, p in self.others.items())
        return sum(map(of, self.ends)) + blocks + others

    @property
    def ends(self) -> tuple[Parameter, ...]:
        """All that belongs to no block."""
        return (*self.before.values(), *self.after.values())

    def num_elements(self, shards: int = 1, trained_only: bool = False) -> int:
        """Elements on the fullest of ``shards`` ranks."""
        return self.total(lambda p: count([p], shards) if p.trained or not trained_only else 0)


def count(parameters: Any, shards: int = 1) -> int:
    """Elements on the fullest of ``shards`` ranks: FSDP2 cuts the first axis into equal parts, rounded up."""
    return sum(-(-p.shape[0] // shards) * math.prod(p.shape[1:]) for p in parameters)


@dataclass(frozen=True)
class Offer:
    """A tensor of another network of the same kind, for the parameter of its name in this one."""

    value: np.ndarray
    there: PredictorConfig
    """The sizes of the other network."""
    shape: Shape
    """What is wanted."""
    labels: Mapping[int, int]
    """Label here -> label there of the same class, the null class among them."""
    draw: Callable[[], np.ndarray]
    """Makes the initial value, float32."""


@dataclass(frozen=True)
class Begun:
    """What a parameter begins as where weights of another network are given."""

    value: np.ndarray
    how: str = ""
    """What was done to the other network's, or why it is new; empty: it is taken as it is."""


@dataclass(frozen=True)
class Kept:
    """Elements kept of one sample from forward to backward, by what decides the bytes of each."""

    norm: float = 0
    """Into and out of norms and elementwise condition: float32 under CUDA's autocast."""
    other: float = 0
    """All else that has the precision of the step."""
    full: int = 0
    """Float32 whatever the precision: statistics."""


class PredictorConfig(ABC):
    """Base of the config classes of section ``predictor``: frozen dataclasses with a field ``model_id``."""

    model_id: str
    in_channels: int
    num_heads = 1  # where there is no attention
    times_told = 1  # of a sample: the ends of an interval are 2
    z_dims: tuple[int, ...] = ()  # widths of what it projects tokens to, for teachers (``forward(..., project=True)``)
    patch_size: Any = (1, 1, 1)  # where latents of clips are cut into no patches
    adaptable: tuple[str, ...] = ("class_dropout_prob",)  # settings that ``begun_from`` bridges

    @property
    @abstractmethod
    def out_channels(self) -> int:
        """Channels of the network's output."""

    @property
    @abstractmethod
    def latent_shape(self) -> Shape:
        """(C, ...) of a latent, of any rank."""

    @property
    @abstractmethod
    def conditions(self) -> Conditions:
        """What steers it, in the order in which the network takes it."""

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """Sequence length N."""

    @abstractmethod
    def parameters(self) -> Parameters:
        """Return the parameters of the network."""

    @abstractmethod
    def multiply_adds(self) -> int:
        """Multiply-adds of one sample in one forward pass; elementwise work is left out, as published counts do."""

    @abstractmethod
    def kept_by_block(self) -> Kept:
        """What one block keeps of a sample for backward."""

    @abstractmethod
    def kept_by_ends(self) -> Kept:
        """What all but the blocks keeps of a sample for backward."""

    @property
    @abstractmethod
    def block_input(self) -> int:
        """Elements of a sample that go into a block: all that recomputation keeps of it."""

    @property
    @abstractmethod
    def widest(self) -> int:
        """Elements of a sample in the widest pair of gradients that backward holds at once."""

    def resized(self, shape: Shape) -> PredictorConfig:
        """Return the same network for latents of ``shape``; raises ConfigError where it takes its own alone."""
        if shape != self.latent_shape:
            raise ConfigError(
                f"latents of shape {shape}", f"predictor {self.model_id!r} takes {self.latent_shape} alone"
            )
        return self

    def narrowed(self) -> PredictorConfig:
        """Return a network of the same kind that is quickly computed, of fewer and narrower blocks; or itself."""
        return self

    def check_context_parallel(self, ranks: int) -> None:
        """Raise ConfigError unless ``ranks`` ranks can share the tokens of a sample."""
        if ranks > 1:
            raise ConfigError(
                f"--context-parallel-size = {ranks}", "this predictor computes a sample on one rank", "use 1"
            )

    def begun_from(self, name: str, offer: Offer) -> Begun | None:
        """Return what the parameter ``name`` begins as, made of another network's; None where nothing can be."""
        return Begun(offer.value) if offer.value.shape == offer.shape else None

    def may_lack(self, name: str) -> bool:
        """Return whether another network of this kind may lack the parameter ``name``, which is then drawn anew here,
        or left out there."""
        return False

    def settings_of_size(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the settings that make a network large, each with the values that an ordinary network has."""
        return {}

    @classmethod
    def of_shapes(cls, shapes: Mapping[str, Shape]) -> PredictorConfig | None:
        """Return the architecture that the tensors of a file tell, or None where they are another predictor's.

        What shows in no shape, such as the number of heads, is left at a value that fits. A file without a
        description (run.json, model.json) can be converted only where this answers.
        """
        return None


def check_shareable(ranks: int, numbers: Mapping[str, int]) -> None:
    """Raise ConfigError unless ``ranks`` ranks can share each of the ``numbers`` evenly: heads and tokens (Ulysses)."""
    shareable = math.gcd(*numbers.values())
    cure = f"use a divisor of {shareable}" if shareable > 1 else "use 1, or samples of another size"
    for what, number in numbers.items():
        if number % ranks:
            raise ConfigError(
                f"--context-parallel-size = {ranks}",
                f"does not divide {what}: {number} % {ranks} = {number % ranks}",
                cure,
            )


def linear(name: str, *shape: int, initial: Rule = Initial.XAVIER_UNIFORM, matrices: int = 1) -> dict[str, Parameter]:
    """Return weight and bias of a linear or convolution layer; the bias begins at zero.

    matrices: how many the weight is, one below the other, as of q, k and v in one layer; of a convolution it is none.
    """
    weight = Parameter(shape, initial, matrices=matrices if len(shape) == 2 else 0)
    return {f"{name}.weight": weight, f"{name}.bias": Parameter(shape[:1])}


def shape_of(shapes: Mapping[str, Shape], name: str, ndim: int) -> Shape:
    """Return one of the shapes of a file; raises CheckpointError where it is missing or has other axes."""
    if name not in shapes:
        raise CheckpointError("SOURCE", f"{name} is missing, without which the architecture is unknown")
    if len(shapes[name]) != ndim:
        raise CheckpointError("SOURCE", f"{name} is {tuple(shapes[name])}, expected {ndim} dimensions")
    return tuple(shapes[name])


def count_of(shapes: Mapping[str, Shape], stem: str) -> int:
    """Return how many ``stem.0``, ``stem.1``, ... there are, whatever the largest number is."""
    numbers = {name[len(stem) + 1 :].split(".")[0] for name in shapes if name.startswith(f"{stem}.")}
    return sum(number.isdecimal() for number in numbers)
