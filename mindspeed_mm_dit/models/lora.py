"""LoRA: low-rank adapters beside linear layers (Hu et al. 2021), for any network built from the framework's layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_mm_dit.configs.tuning import LoraSpec
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.framework import nn, ops

Tensor = Any  # a tensor of the active framework


class LoraLinear(nn.Module):
    """A linear layer, whose names stay, with an adapter: x W^T + b + scale (x A^T) B^T (Hu et al. 2021, eq. 3)."""

    def __init__(self, layer: Any, beside: LoraSpec) -> None:
        super().__init__()
        out_features, in_features = layer.weight.shape
        self.scale = beside.scale
        self.weight, self.bias = layer.weight, layer.bias
        self.lora_A = nn.Linear(in_features, beside.rank, bias=False)
        self.lora_B = nn.Linear(beside.rank, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        change = self.lora_B(self.lora_A(x))  # (..., out)
        return ops.linear(x, self.weight, self.bias) + self.scale * change  # (..., out)


def with_adapters(network: Any, adapters: Mapping[str, LoraSpec]) -> Any:
    """Put an adapter beside each layer that ``adapters`` names, in place; the values come later.

    Raises ConfigError for a layer that is not a linear layer of the framework.
    """
    modules = dict(network.named_modules())
    for name, beside in adapters.items():
        layer = modules.get(name)
        if not isinstance(layer, nn.Linear):
            kind = "absent" if layer is None else f"a {type(layer).__name__}"
            raise ConfigError(f"an adapter for {name}", f"in the network it is {kind}, not a Linear of framework.nn")
        owner, _, own = name.rpartition(".")
        _put(modules[owner], own, LoraLinear(layer, beside))
    return network


def _put(owner: Any, name: str, module: Any) -> None:
    if name.isdecimal():  # in a ModuleList or Sequential
        owner[int(name)] = module
    else:
        setattr(owner, name, module)
