"""The interface of a predictor's config: its parameters, its arithmetic, and its memory.

A predictor is a config class with this interface, which needs no framework, and a network with exactly these
parameters; ``models/registry.py`` joins the two. Plan, checkpoints, initial weights and hosts use the config, never the
network.
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
    """How a parameter is initialised; ``models/init.py`` does it."""

    ZEROS = "zeros"
    ONES = "ones"
    XAVIER_UNIFORM = "xavier_uniform"
    """Glorot & Bengio 2010, eq. 16; axes past the second count as inputs."""
    SINCOS_2D = "sincos_2d"
    """DiT's positional embedding of a square grid; the shape is (1, tokens, width)."""


@dataclass(frozen=True)
class Normal:
    """Initialisation by a normal distribution of mean 0."""

    std: float


Rule = Initial | Normal | Callable[[np.random.Generator, Shape], np.ndarray]
"""How to initialise. A function gets its own generator and the shape, for whatever the others cannot express."""


@dataclass(frozen=True)
class Parameter:
    """One tensor of a network."""

    shape: Shape
    initial: Rule = Initial.ZEROS
    trained: bool = True
    """Whether it is trained. If not, it keeps its initial value, and is still saved."""
    saved: bool = True
    """Whether checkpoints contain it. If not, it belongs to a frozen base, of which they keep a digest."""
    matrices: int = 0
    """Number of matrices stacked in it, e.g. 3 for q, k and v in one layer; 0 for a vector, a table, a filter, or the
    last layer. Some optimizers (Muon) treat matrices specially."""


@dataclass(frozen=True)
class Parameters:
    """All parameters of a network. Its blocks are alike; with sharded weights, one at a time is gathered."""

    before: Mapping[str, Parameter]
    """Before the blocks, by name."""
    block: Mapping[str, Parameter]
    """One block, by name within it."""
    num_blocks: int
    after: Mapping[str, Parameter] = field(default_factory=dict)
    """After the blocks, by name."""
    stem: str = "blocks"
    """Block i is called "stem.i"."""
    others: Mapping[str, Parameter] = field(default_factory=dict)
    """Parameters in which single blocks differ from ``block``, by their full name in a checkpoint."""

    def __iter__(self) -> Iterator[tuple[str, Parameter]]:
        """Yield (name in a checkpoint, parameter), in the order of the network."""
        yield from self.before.items()
        for i in range(self.num_blocks):
            own = {f"{self.stem}.{i}.{name}": parameter for name, parameter in self.block.items()}
            yield from ((name, self.others.get(name, parameter)) for name, parameter in own.items())
        yield from ((name, parameter) for name, parameter in self.others.items() if not self._of_block(name))
        yield from self.after.items()

    def _of_block(self, name: str) -> Parameter | None:
        """Return the parameter of ``block`` with the full ``name``, or None."""
        return self.block.get(name.removeprefix(f"{self.stem}.").partition(".")[2])

    def shapes(self, trained_only: bool = False, saved_only: bool = False) -> dict[str, Shape]:
        """Return the shape of each parameter, by its name in a checkpoint."""
        return {
            name: p.shape for name, p in self if (p.trained or not trained_only) and (p.saved or not saved_only)
        }  # fmt: skip

    def total(self, of: Callable[[Parameter], int]) -> int:
        """Return the sum of ``of`` over all parameters, without iterating over the blocks."""
        blocks = self.num_blocks * sum(map(of, self.block.values()))
        others = sum(of(p) - (of(common) if (common := self._of_block(name)) else 0) for name, p in self.others.items())
        return sum(map(of, self.ends)) + blocks + others

    @property
    def ends(self) -> tuple[Parameter, ...]:
        """The parameters outside the blocks."""
        return (*self.before.values(), *self.after.values())

    def num_elements(self, shards: int = 1, trained_only: bool = False) -> int:
        """Return the number of elements on the fullest of ``shards`` ranks."""
        return self.total(lambda p: count([p], shards) if p.trained or not trained_only else 0)


def count(parameters: Any, shards: int = 1) -> int:
    """Return the elements on the fullest of ``shards`` ranks: FSDP2 splits the first axis evenly, rounded up."""
    return sum(-(-p.shape[0] // shards) * math.prod(p.shape[1:]) for p in parameters)


@dataclass(frozen=True)
class Offer:
    """A tensor of another network of the same kind, offered to the parameter of the same name in this one."""

    value: np.ndarray
    there: PredictorConfig
    """Config of the other network."""
    shape: Shape
    """Shape needed here."""
    labels: Mapping[int, int]
    """Label here -> label there, for the classes that both have, including the null class."""
    draw: Callable[[], np.ndarray]
    """Makes a fresh initial value, float32."""


@dataclass(frozen=True)
class Begun:
    """The initial value of a parameter when fine-tuning from another network's weights."""

    value: np.ndarray
    how: str = ""
    """How the other network's tensor was changed, or why the value is new; empty: it was copied."""


@dataclass(frozen=True)
class Kept:
    """Elements that one sample keeps from forward to backward, grouped by their precision."""

    norm: float = 0
    """Inputs and outputs of norms and elementwise condition: float32 under CUDA's autocast."""
    other: float = 0
    """All others in the precision of the step."""
    full: int = 0
    """Statistics, which are always float32."""


class PredictorConfig(ABC):
    """Base of the config classes of section ``predictor``: frozen dataclasses with a field ``model_id``."""

    model_id: str
    in_channels: int
    num_heads = 1  # without attention
    times_told = 1  # times that it takes per sample; 2 for the ends of an interval
    z_dims: tuple[int, ...] = ()  # widths of the projections for teachers (``forward(..., project=True)``)
    patch_size: Any = (1, 1, 1)  # without patches, for latents of clips
    adaptable: tuple[str, ...] = ("class_dropout_prob",)  # settings in which the source of ``begun_from`` may differ

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
        """Its conditions, in the order of the network's arguments."""

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """Sequence length N."""

    @abstractmethod
    def parameters(self) -> Parameters:
        """Return the parameters of the network."""

    @abstractmethod
    def multiply_adds(self) -> int:
        """Return the multiply-adds of one forward pass of one sample, without elementwise work, as published counts."""

    @abstractmethod
    def kept_by_block(self) -> Kept:
        """Return what one block keeps of a sample for backward."""

    @abstractmethod
    def kept_by_ends(self) -> Kept:
        """Return what everything outside the blocks keeps of a sample for backward."""

    @property
    @abstractmethod
    def block_input(self) -> int:
        """Elements of a sample that enter a block: all that recomputation keeps of it."""

    @property
    @abstractmethod
    def widest(self) -> int:
        """Elements of a sample in the widest pair of gradients that backward holds at once."""

    def resized(self, shape: Shape) -> PredictorConfig:
        """Return the same network for latents of ``shape``; raises ConfigError if it takes only its own shape."""
        if shape != self.latent_shape:
            raise ConfigError(
                f"latents of shape {shape}", f"predictor {self.model_id!r} takes {self.latent_shape} alone"
            )
        return self

    def narrowed(self) -> PredictorConfig:
        """Return a smaller, faster network of the same kind, with fewer and narrower blocks; or itself."""
        return self

    def check_context_parallel(self, ranks: int) -> None:
        """Raise ConfigError unless ``ranks`` ranks can split the tokens of a sample."""
        if ranks > 1:
            raise ConfigError(
                f"--context-parallel-size = {ranks}", "this predictor cannot split a sample over ranks", "use 1"
            )

    def begun_from(self, name: str, offer: Offer) -> Begun | None:
        """Return the initial value of parameter ``name``, adapted from another network's; None if impossible."""
        return Begun(offer.value) if offer.value.shape == offer.shape else None

    def may_lack(self, name: str) -> bool:
        """Return whether another network of this kind may lack the parameter ``name``.

        It is then initialised afresh here, or left out there.
        """
        return False

    def settings_of_size(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the settings that make a network large, each with the values of an ordinary network."""
        return {}

    @classmethod
    def of_shapes(cls, shapes: Mapping[str, Shape]) -> PredictorConfig | None:
        """Return the architecture that the tensors of a file imply, or None if they are another predictor's.

        Settings that no shape shows, such as the number of heads, get a value that fits. A file without a description
        (run.json, model.json) can be converted only if this returns an architecture.
        """
        return None


def check_shareable(ranks: int, numbers: Mapping[str, int]) -> None:
    """Raise ConfigError unless ``ranks`` ranks can split each of the ``numbers`` evenly: heads and tokens (Ulysses)."""
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
    """Return weight and bias of a linear or convolution layer; the bias is initialised to zero.

    matrices: number of matrices stacked in the weight, e.g. 3 for q, k and v; a convolution has none.
    """
    weight = Parameter(shape, initial, matrices=matrices if len(shape) == 2 else 0)
    return {f"{name}.weight": weight, f"{name}.bias": Parameter(shape[:1])}


def shape_of(shapes: Mapping[str, Shape], name: str, ndim: int) -> Shape:
    """Return the shape of ``name``; raises CheckpointError if it is missing or does not have ``ndim`` axes."""
    if name not in shapes:
        raise CheckpointError("SOURCE", f"{name} is missing, without which the architecture is unknown")
    if len(shapes[name]) != ndim:
        raise CheckpointError("SOURCE", f"{name} is {tuple(shapes[name])}, expected {ndim} dimensions")
    return tuple(shapes[name])


def count_of(shapes: Mapping[str, Shape], stem: str) -> int:
    """Return how many of ``stem.0``, ``stem.1``, ... there are, whatever the largest number is."""
    numbers = {name[len(stem) + 1 :].split(".")[0] for name in shapes if name.startswith(f"{stem}.")}
    return sum(number.isdecimal() for number in numbers)
