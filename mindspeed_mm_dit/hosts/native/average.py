"""The moving average of the weights, as buffers of the model: the engine then shards, saves and loads it by itself."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mindspeed_mm_dit.training.pytorch.ema import MovingAverage

EMA = "ema"
"""Name of the module that holds the averages; a checkpoint has them under ``model.ema.<name of the weight>``."""


class SavedAverage(MovingAverage):
    """A moving average whose tensors are buffers of ``model``."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__(dict(model.named_parameters()), decay)
        model.add_module(EMA, _holder(self.averages))

    @torch.no_grad()
    def begin_again(self) -> None:
        """Set every average to the weight it is of."""
        for name, average in self.averages.items():
            average.copy_(self._parameters[name])


def _holder(tensors: dict[str, Tensor]) -> nn.Module:
    """Return modules nested as the names of ``tensors`` are, with these as buffers."""
    root = nn.Module()
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        place = root
        for part in path:
            if part not in place._modules:
                place.add_module(part, nn.Module())
            place = place.get_submodule(part)
        place.register_buffer(leaf, tensor)
    return root
