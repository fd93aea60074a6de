"""Parameters and arithmetic of a DiT from its config."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mindspeed_mm_dit.configs.model import DiTConfig

FREQUENCY_WIDTH = 256
"""Width of the sinusoidal timestep code that enters the timestep MLP."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Shapes:
    """Shapes of the parameters by the part that holds them; FSDP gathers one block at a time."""

    positions: tuple[Shape, ...]
    """Frozen position code: saved, not trained."""
    ends: tuple[Shape, ...]
    """Patch, timestep and label embedders, last modulated norm and linear layer."""
    block: tuple[Shape, ...]
    """One transformer block."""
    num_blocks: int
    """How many there are."""

    def num_elements(self, shards: int = 1, trained_only: bool = False) -> int:
        """Elements on the fullest of ``shards`` ranks, however many blocks there are."""
        outside = self.ends if trained_only else self.positions + self.ends
        return count(outside, shards) + self.num_blocks * count(self.block, shards)

    @property
    def trained(self) -> tuple[Shape, ...]:
        """Every parameter with a gradient."""
        return self.ends + self.block * self.num_blocks

    @property
    def all(self) -> tuple[Shape, ...]:
        """Every parameter; published counts include the positions."""
        return self.positions + self.trained


def shapes(config: DiTConfig) -> Shapes:
    """Return the shapes of all parameters, as the network declares them."""
    D, P, hidden = config.hidden_size, config.patch_size, int(config.hidden_size * config.mlp_ratio)
    embedders = (
        (D, config.in_channels, P, P),
        (D,),
        *_linear(FREQUENCY_WIDTH, D),
        *_linear(D, D),
        (config.num_embeddings, D),
    )
    final_layer = (*_linear(D, P * P * config.out_channels), *_linear(D, 2 * D))
    block = (
        *_linear(D, 3 * D),
        *_linear(D, D),
        *_linear(D, hidden),
        *_linear(hidden, D),
        *_linear(D, 6 * D),
    )
    return Shapes(((1, config.num_tokens, D),), (*embedders, *final_layer), block, config.num_layers)


def count(parameters: tuple[Shape, ...], shards: int = 1) -> int:
    """Elements on the fullest of ``shards`` ranks: FSDP2 cuts the first axis into equal parts, rounded up."""
    return sum(-(-shape[0] // shards) * math.prod(shape[1:]) for shape in parameters)


def forward_multiply_adds(config: DiTConfig) -> int:
    """Multiply-adds of one image in one forward pass; elementwise work is left out, as published counts do."""
    D, N, hidden = config.hidden_size, config.num_tokens, int(config.hidden_size * config.mlp_ratio)
    patch = config.patch_size**2
    block = N * (4 * D * D + 2 * D * hidden) + 2 * N * N * D + 6 * D * D
    ends = N * patch * D * (config.in_channels + config.out_channels) + 2 * D * D
    return config.num_layers * block + ends + FREQUENCY_WIDTH * D + D * D


def train_flop(config: DiTConfig) -> int:
    """FLOP of one image in one train step: forward and twice that in backward, two FLOP a multiply-add."""
    return 6 * forward_multiply_adds(config)


def recompute_flop(config: DiTConfig) -> int:
    """FLOP that recomputing the blocks adds to an image's train step; not counted as useful in MFU."""
    return 2 * forward_multiply_adds(config)


def _linear(inputs: int, outputs: int) -> tuple[Shape, Shape]:
    return (outputs, inputs), (outputs,)
