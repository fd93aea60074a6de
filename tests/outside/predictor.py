"""A predictor as another package brings it: its config and its network."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from mindspeed_mm_dit.configs.condition import ClassLabel, Conditions
from mindspeed_mm_dit.configs.predictor import Initial, Kept, Normal, Parameter, Parameters, PredictorConfig, linear


@dataclass(frozen=True)
class ResidualConfig(PredictorConfig):
    """Residual layers over a whole image."""

    side: int
    classes: int
    in_channels: int
    width: int = 32
    num_layers: int = 2
    dropout: float = 0.1
    model_id: str = "residual"

    @property
    def out_channels(self) -> int:
        return self.in_channels

    @property
    def conditions(self) -> Conditions:
        return Conditions(ClassLabel(self.classes, self.dropout))

    @property
    def latent_shape(self) -> tuple[int, ...]:
        return (self.in_channels, self.side, self.side)

    @property
    def num_tokens(self) -> int:
        return 1

    def parameters(self) -> Parameters:
        size, D = math.prod(self.latent_shape), self.width
        labels = {"labels.weight": Parameter((self.classes + 1, D), Normal(0.02))}
        return Parameters(
            {**linear("first", D, size + 1), **labels},
            {
                "norm.weight": Parameter((D,), Initial.ONES),
                **linear("layer", D, D),
                "gain": Parameter((D,), lambda draw, shape: 0.1 + 0.01 * draw.random(shape)),
            },
            self.num_layers,
            linear("last", size, D, initial=Initial.ZEROS),
            stem="stages",
        )

    def multiply_adds(self) -> int:
        size, D = math.prod(self.latent_shape), self.width
        return (2 * size + 1) * D + self.num_layers * D * D

    def kept_by_block(self) -> Kept:
        return Kept(norm=2 * self.width, other=3 * self.width)

    def kept_by_ends(self) -> Kept:
        return Kept(other=2 * self.width)

    @property
    def block_input(self) -> int:
        return self.width

    @property
    def widest(self) -> int:
        return self.width


def build(config: ResidualConfig) -> Any:
    """Build the network of the active framework."""
    from mindspeed_mm_dit.framework import nn, ops

    size, D = math.prod(config.latent_shape), config.width

    class Stage(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.layer, self.act = nn.RMSNorm(D, eps=1e-6), nn.Linear(D, D), nn.SiLU()
            self.gain = nn.parameter((D,))

        def forward(self, x):
            return x + self.gain * self.act(self.layer(self.norm(x)))

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.labels = nn.Linear(size + 1, D), nn.Embedding(config.classes + 1, D)
            self.stages = nn.ModuleList([Stage() for _ in range(config.num_layers)])
            self.last = nn.Linear(D, size)

        def forward(self, x, t, y):
            times = ops.to_float32(t)[:, None] / 1000
            x = self.first(ops.cat([ops.reshape(x, (x.shape[0], -1)), times], 1)) + self.labels(y)
            for stage in self.stages:
                x = stage(x)
            return ops.reshape(self.last(x), (x.shape[0], *config.latent_shape))

    return Residual()
