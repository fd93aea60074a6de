"""The moving average of the weights that samples are drawn from, sharded like the model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mindspeed_mm_dit.framework.pytorch.optim import split_by_kind


class MovingAverage:
    """average <- decay * average + (1 - decay) * weights, after every optimizer step; in float32."""

    def __init__(self, parameters: Mapping[str, Tensor], decay: float) -> None:
        self.decay = decay
        self._parameters = dict(parameters)
        self.averages = {name: p.detach().float().clone() for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Move every average towards the present weights."""
        weights = (p.float() for p in self._parameters.values())
        kinds = (split_by_kind(tensors) for tensors in (self.averages.values(), weights))
        for averages, weights in zip(*kinds):
            torch._foreach_lerp_(averages, weights, 1 - self.decay)
