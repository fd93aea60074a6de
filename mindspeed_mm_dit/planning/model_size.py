"""Parameters and arithmetic of a DiT from its config."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_mm_dit.configs.model import DiTConfig

FREQUENCY_WIDTH = 256
"""Width of the sinusoidal timestep code that enters the timestep MLP."""


@dataclass(frozen=True)
class Parameters:
    """Parameters of a DiT by the part that holds them; FSDP gathers one block at a time."""

    positions: int
    """Frozen position code: saved, not trained."""
    embedders: int
    """Patch, timestep and label embedders."""
    block: int
    """One transformer block."""
    blocks: int
    """All transformer blocks."""
    final_layer: int
    """Last modulated norm and linear layer."""

    @property
    def total(self) -> int:
        """All parameters, the frozen positions among them, as published counts have it."""
        return self.positions + self.trained

    @property
    def trained(self) -> int:
        """Parameters with a gradient."""
        return self.embedders + self.blocks + self.final_layer


def parameters(config: DiTConfig) -> Parameters:
    """Count the parameters of every part."""
    D, hidden = config.hidden_size, int(config.hidden_size * config.mlp_ratio)
    patch = config.patch_size**2
    block = _linear(D, 3 * D) + _linear(D, D) + _linear(D, hidden) + _linear(hidden, D) + _linear(D, 6 * D)
    embedders = (
        _linear(config.in_channels * patch, D) + _linear(FREQUENCY_WIDTH, D) + _linear(D, D) + config.num_embeddings * D
    )
    final_layer = _linear(D, patch * config.out_channels) + _linear(D, 2 * D)
    return Parameters(config.num_tokens * D, embedders, block, block * config.num_layers, final_layer)


def forward_multiply_adds(config: DiTConfig) -> int:
    """Multiply-adds of one image in one forward pass; elementwise work is left out, as published counts do."""
    D, N, hidden = config.hidden_size, config.num_tokens, int(config.hidden_size * config.mlp_ratio)
    patch = config.patch_size**2
    block = N * (3 * D * D + D * D + 2 * D * hidden) + 2 * N * N * D + 6 * D * D
    ends = N * patch * D * (config.in_channels + config.out_channels) + 2 * D * D
    return config.num_layers * block + ends + FREQUENCY_WIDTH * D + D * D


def train_flop(config: DiTConfig) -> int:
    """FLOP of one image in one train step: forward and twice that in backward, two FLOP a multiply-add."""
    return 6 * forward_multiply_adds(config)


def recompute_flop(config: DiTConfig) -> int:
    """FLOP that recomputing the blocks adds to an image's train step; not counted as useful in MFU."""
    return 2 * forward_multiply_adds(config)


def _linear(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs
