"""The interface of a predictor's config: its settings, and what follows from them without building the network.

A predictor is a config class with this interface, which needs no framework, and the network that it names. Plans,
checkpoints and initial weights build the network on the meta backend, which has shapes only (``models/meta.py``). The
network declares its parameters with its layers (``framework/contract.py``); others read :class:`ParameterSpecs`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, ClassVar

import numpy as np

from mindspeed_mm_dit.configs.condition import Conditions
from mindspeed_mm_dit.configs.limits import Section
from mindspeed_mm_dit.errors import ConfigError

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


Initializer = Initial | Normal | Callable[[np.random.Generator, Shape], np.ndarray]
"""How to initialise. A function, for anything else, gets a generator and the shape; for a parameter that is not
trained it must be deterministic."""


@dataclass(frozen=True)
class ParameterSpec:
    """One tensor of a network."""

    shape: Shape
    initial: Initializer = ZEROS
    trained: bool = True
    """Whether it is trained. If not, it keeps its initial value, and is still saved."""
    saved: bool = True
    """Whether checkpoints contain it. If not, it belongs to a frozen base model, of which they store a digest."""
    stored_as: str = ""
    """Format of few bits that a frozen weight is kept in (``framework/low_bit.py``); empty: float32."""
    matrices: int = 0
    """Number of matrices fused in it, e.g. 3 for q, k and v in one layer; 0 for a vector, a table, a filter, or the
    last layer. Muon orthogonalises each matrix separately."""


@dataclass(frozen=True)
class ParameterSpecs(Mapping[str, ParameterSpec]):
    """All parameters of a network by their names in a checkpoint, in the order of the network."""

    by_name: Mapping[str, ParameterSpec]
    blocks: tuple[str, ...] = ()
    """Names of the network's blocks, "blocks.0", "blocks.1", ... Sharded weights are gathered block by block."""

    def __getitem__(self, name: str) -> ParameterSpec:
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

    def by_block(self) -> dict[str, list[ParameterSpec]]:
        """Return the parameters of each block by its name, and those outside of all blocks under ""."""
        parameters: dict[str, list[ParameterSpec]] = {"": [], **{block: [] for block in self.blocks}}
        for name, p in self.items():
            parameters[self.block_of(name)].append(p)
        return parameters


def count(parameters: Iterable[ParameterSpec], shards: int = 1) -> int:
    """Return the elements on the fullest of ``shards`` ranks: FSDP2 splits the first axis evenly, rounded up."""
    return sum(-(-p.shape[0] // shards) * math.prod(p.shape[1:]) for p in parameters)


class PredictorConfig(Section, ABC):
    """Base of the config classes of section ``predictor``: frozen dataclasses with a field ``model_id``."""

    section = "predictor"
    model_id: str
    """Kind of network."""
    network: ClassVar[str]
    """Class of the network, "package.module:Class", a module of ``framework.nn``; imported when it is built."""
    adapter: ClassVar[str] = "mindspeed_mm_dit.models.weight_adapters:WeightConverter"
    """Class that makes weights of other sizes and forms fit the network, likewise."""
    diffusers_class: ClassVar[str] = ""
    """Name of the network's class in diffusers, if settings and tensors have the same names there."""
    in_channels: int
    num_heads = 1  # without attention
    hidden_size: Any = 1  # width of a token; without tokens
    num_time_inputs = 1  # timesteps per sample; 2 for the ends of an interval (MeanFlow)
    data_time: int | None = None  # time of clean data in its published flow matching; None: any objective
    z_dims: tuple[int, ...] = ()  # widths of the projections for teachers (``forward(..., project=True)``)
    patch_size: Any = (1, 1, 1)  # without patches, for latents of clips
    published_sampler: tuple[str, int] | None = None  # sampler and steps that it was published with
    frame_rate: float | None = None  # frames per second of its videos, if it was published with a rate
    guidance_embeds: bool = False  # whether the guidance scale is an input, ``guidance``

    @property
    @abstractmethod
    def out_channels(self) -> int:
        """Channels of the network's output."""

    @property
    @abstractmethod
    def latent_shape(self) -> Shape:
        """(C, ...) of a latent, of any rank."""

    @property
    def latent_channels(self) -> int:
        """Channels C of a latent; the network may take more, made from conditions."""
        return self.in_channels

    @property
    @abstractmethod
    def conditions(self) -> Conditions:
        """Its conditions, in the order of the network's arguments."""

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """Sequence length N."""

    def resized(self, shape: Shape) -> PredictorConfig:
        """Return the same network for latents of ``shape``; raises ConfigError if it takes only one shape."""
        if shape != self.latent_shape:
            raise ConfigError(
                f"Predictor {self.model_id!r} takes only latents of shape {self.latent_shape}, not {shape}. Use the "
                "size in its model.json."
            )
        return self

    def with_guidance(self, guidance: float | None) -> PredictorConfig:
        """Return the same network with this ``guidance`` scale as an input; ConfigError if it has no such input."""
        if guidance is None:
            return self
        if not self.guidance_embeds:
            raise ConfigError(
                f"--guidance = {guidance:g} has no effect: predictor {self.model_id!r} takes no guidance scale as an "
                "input. Leave it out, and use --cfg-scale."
            )
        return replace(self, guidance=guidance)  # type: ignore[type-var]

    def cfg_scale(self, usual: float) -> float:
        """Return the scale of classifier-free guidance: ``usual``, or 1 for a guidance-distilled network."""
        return 1.0 if self.guidance_embeds else usual

    def reduced_width(self) -> PredictorConfig:
        """Return a smaller, faster network of the same kind, with fewer and narrower blocks, for tests; or itself."""
        return self

    def check_context_parallel(self, ranks: int) -> None:
        """Raise ConfigError unless ``ranks`` ranks can split the tokens of a sample."""
        if ranks > 1:
            raise ConfigError(
                f"--context-parallel-size = {ranks} is not possible, as this predictor cannot split a sample. Use 1."
            )

    def settings_of_size(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the settings that decide the size of a network, each with the values of an ordinary network."""
        return {}


def check_shareable(ranks: int, numbers: Mapping[str, int]) -> None:
    """Raise ConfigError unless ``ranks`` ranks can split each of the ``numbers`` evenly: heads and tokens (Ulysses)."""
    shareable = math.gcd(*numbers.values())
    hint = f"Use a divisor of {shareable}." if shareable > 1 else "Use 1, or another sample size."
    for name, number in numbers.items():
        if number % ranks:
            raise ConfigError(
                f"--context-parallel-size = {ranks} does not divide {name}: {number} % {ranks} = {number % ranks}. "
                f"{hint}"
            )
