"""LoRA: low-rank adapters of linear layers (Hu et al. 2021), for any network built from the framework's layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_mm_dit.configs.tuning import LoraSpec
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.framework import nn, ops

Tensor = Any  # a tensor of the active framework


class LoraLinear(nn.Module):
    """A linear layer, whose parameter names stay, with an adapter: x W^T + b + scale (x A^T) B^T (Hu et al., eq. 3)."""

    def __init__(self, layer: Any, spec: LoraSpec) -> None:
        super().__init__()
        out_features, in_features = layer.weight.shape
        self.scale = spec.scale
        self.weight, self.bias = layer.weight, layer.bias
        self.lora_A = nn.Linear(in_features, spec.rank, bias=False)
        self.lora_B = nn.Linear(spec.rank, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        change = self.lora_B(self.lora_A(x))  # (..., out)
        return ops.linear(x, self.weight, self.bias) + self.scale * change  # (..., out)


def with_adapters(network: Any, adapters: Mapping[str, LoraSpec]) -> Any:
    """Add an adapter to each layer that ``adapters`` names, in place; its values are loaded later.

    Raises ConfigError for a layer that is not a linear layer of the framework.
    """
    modules = dict(network.named_modules())
    for name, spec in adapters.items():
        layer = modules.get(name)
        if not isinstance(layer, nn.Linear):
            kind = "absent" if layer is None else f"a {type(layer).__name__}"
            raise ConfigError(f"an adapter for {name}", f"in the network it is {kind}, not a Linear of framework.nn")
        owner, _, attribute = name.rpartition(".")
        _set_module(modules[owner], attribute, LoraLinear(layer, spec))
    return network


def _set_module(owner: Any, name: str, module: Any) -> None:
    if name.isdecimal():  # in a ModuleList or Sequential
        owner[int(name)] = module
    else:
        setattr(owner, name, module)
