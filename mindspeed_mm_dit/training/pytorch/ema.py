"""The moving average of the weights that samples are drawn from, sharded like the model."""

from __future__ import annotations

import torch
from torch import nn

from mindspeed_mm_dit.framework.pytorch.optim import split_by_kind


class MovingAverage:
    """average <- decay * average + (1 - decay) * weights, after every optimizer step."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self._parameters = dict(module.named_parameters())
        self.averages = {name: p.detach().clone() for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Move every average towards the present weights."""
        kinds = (split_by_kind(tensors.values()) for tensors in (self.averages, self._parameters))
        for averages, weights in zip(*kinds):
            torch._foreach_lerp_(averages, weights, 1 - self.decay)
