"""The network of ``predictor.py``."""

import math

from mindspeed_mm_dit.configs.predictor import ZEROS, Normal
from mindspeed_mm_dit.framework import nn, ops


def gain(draw, shape):
    """Return the initial gains."""
    return 0.1 + 0.01 * draw.random(shape)


class Stage(nn.Module):
    """A residual layer."""

    def __init__(self, D):
        super().__init__()
        self.norm, self.layer, self.act = nn.RMSNorm(D, eps=1e-6), nn.Linear(D, D), nn.SiLU()
        self.gain = nn.parameter((D,), gain)

    def forward(self, x):
        return x + self.gain * self.act(self.layer(self.norm(x)))  # (B, D)


class Residual(nn.Module):
    """Residual layers over a whole image."""

    def __init__(self, config):
        super().__init__()
        self.latent_shape = config.latent_shape
        size, D = math.prod(config.latent_shape), config.width
        self.first = nn.Linear(size + 1, D)
        self.labels = nn.Embedding(config.classes + 1, D, init=Normal(0.02))
        self.stages = nn.Blocks([Stage(D) for _ in range(config.num_layers)])
        self.last = nn.Linear(D, size, init=ZEROS)

    def forward(self, x, t, y):
        times = ops.to_float32(t)[:, None] / 1000  # (B, 1)
        given = ops.cat([ops.reshape(x, (x.shape[0], -1)), times], 1)  # float32, and weights may be bfloat16
        x = self.first(ops.cast_like(given, self.first.weight)) + self.labels(y)  # (B, D)
        for stage in self.stages:
            x = stage(x)  # (B, D)
        return ops.reshape(self.last(x), (x.shape[0], *self.latent_shape))  # (B, C, H, W)
