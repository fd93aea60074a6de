"""The moving average of the weights that samples are drawn from, sharded like the model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from mindspeed_mm_dit.framework.pytorch.optim import split_by_kind


class MovingAverage:
    """average <- decay * average + (1 - decay) * weights, after every optimizer step; in float32."""

    def __init__(self, parameters: Mapping[str, Tensor], decay: float) -> None:
        self.decay = decay
        self._parameters = dict(parameters)
        self.averages = {name: p.detach().float().clone() for name, p in self._parameters.items()}

    @contextlib.contextmanager
    def in_place_of_the_weights(self) -> Iterator[None]:
        """While entered, the parameters hold the averages; afterwards both are what they were, to the bit."""
        kept = {name: p.detach().clone() for name, p in self._parameters.items()}
        self._set(self.averages)
        try:
            yield
        finally:
            self._set(kept)

    @torch.no_grad()
    def _set(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(values[name])

    @torch.no_grad()
    def update(self) -> None:
        """Move every average towards the present weights."""
        weights = (p.float() for p in self._parameters.values())
        kinds = (split_by_kind(tensors) for tensors in (self.averages.values(), weights))
        for averages, weights in zip(*kinds):
            torch._foreach_lerp_(averages, weights, 1 - self.decay)
