"""EMAs of the weights, sharded like the model: the one that samples are generated with, and power-function EMAs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from mindspeed_mm_dit.checkpoint import power_ema
from mindspeed_mm_dit.framework.pytorch.optim import split_by_kind


class MovingAverage:
    """EMA in float32: average <- decay * average + (1 - decay) * weights, after every optimizer step."""

    def __init__(self, parameters: Mapping[str, Tensor], decay: float) -> None:
        self.decay = decay
        self._parameters = dict(parameters)
        self.averages = {name: _full(p.detach()).clone() for name, p in self._parameters.items()}

    @contextlib.contextmanager
    def in_place_of_the_weights(self) -> Iterator[None]:
        """While entered, the parameters hold the EMA; afterwards both are bit for bit what they were."""
        weights = {name: p.detach().clone() for name, p in self._parameters.items()}
        self._set(self.averages)
        try:
            yield
        finally:
            self._set(weights)

    @torch.no_grad()
    def _set(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(values[name])

    def update(self) -> None:
        """Move towards the present weights by 1 - decay."""
        self.move(1 - self.decay)

    @torch.no_grad()
    def move(self, fraction: float) -> None:
        """Move by ``fraction`` of the distance to the present weights; 1 is all of it."""
        weights = map(_full, self._parameters.values())
        kinds = (split_by_kind(tensors) for tensors in (self.averages.values(), weights))
        for averages, weights in zip(*kinds):
            torch._foreach_lerp_(averages, weights, fraction)


def _full(tensor: Tensor) -> Tensor:
    """Return a tensor in float32; float64 stays float64."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


class PowerEmas:
    """``count`` power-function EMAs (``checkpoint/power_ema.py``)."""

    def __init__(self, parameters: Mapping[str, Tensor], count: int) -> None:
        self._averages = [MovingAverage(parameters, decay=0.0) for _ in range(count)]

    def move(self, fractions: Sequence[float]) -> None:
        """Move each EMA towards the present weights, by its fraction in ``fractions``."""
        for average, fraction in zip(self._averages, fractions):
            average.move(fraction)

    def begin(self) -> None:
        """Start from the present weights, as if all steps so far had had them."""
        for average in self._averages:
            average.move(1.0)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the EMAs, by their names in the checkpoint; the tensors are the live ones."""
        names = power_ema.trees(len(self._averages))
        return {name: dict(average.averages) for name, average in zip(names, self._averages)}
