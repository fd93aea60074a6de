"""Layers: PyTorch's own or subclasses of them, so that torch.compile, FSDP2 and hooks see ordinary modules.

What a layer declares of its parameters (``init``, ``matrices``) is read on the meta backend; their values come later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import GELU, GroupNorm, Module, ModuleList, Sequential, SiLU

from mindspeed_mm_dit.configs.parameters import Rule, Shape
from mindspeed_mm_dit.framework.pytorch.linear import Linear


class Blocks(ModuleList):
    """The blocks of a network."""


class Conv2d(torch.nn.Conv2d):
    """PyTorch's convolution."""

    def __init__(self, *sizes: int, init: Rule | None = None, **options: Any) -> None:
        super().__init__(*sizes, **options)


class Embedding(torch.nn.Embedding):
    """PyTorch's table."""

    def __init__(self, num_embeddings: int, embedding_dim: int, init: Rule | None = None) -> None:
        super().__init__(num_embeddings, embedding_dim)


class LayerNorm(torch.nn.LayerNorm):
    """PyTorch's LayerNorm, in float32 under autocast on a CPU as well.

    On a GPU autocast itself lets it compute in float32. On a CPU it does not, and the kernel adds up the gradients of
    the weights in bfloat16: where many cancel, a quarter of the sum is lost.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Norm ``input`` over its last axis."""
        return super().forward(input if self.weight is None else input.to(self.weight.dtype))


class RMSNorm(torch.nn.RMSNorm):
    """PyTorch's RMSNorm, in float32 under autocast: an input of fewer bits than the weights would disable fusion."""

    def forward(self, input: Tensor) -> Tensor:
        """Norm ``input`` over its last axis."""
        return super().forward(input.to(torch.promote_types(input.dtype, self.weight.dtype)))


__all__ = [
    "GELU", "Blocks", "Conv2d", "Embedding", "GroupNorm", "LayerNorm", "Linear", "Module",
    "ModuleList", "RMSNorm", "Sequential", "SiLU", "parameter", "set_constant", "untrained",
]  # fmt: skip


def parameter(shape: Shape, init: Rule | None = None, trained: bool = True, matrices: int = 0) -> torch.nn.Parameter:
    """Return a parameter of a module. Its values come later, unless it is not trained and ``init`` is a function."""
    value = torch.zeros(shape) if trained or not callable(init) else torch.tensor(init(np.random.default_rng(0), shape))
    return torch.nn.Parameter(value, requires_grad=trained)


def set_constant(module: Module, name: str, shape: Shape, make: Callable[[], np.ndarray]) -> None:
    """Give ``module`` a tensor that moves with it and is neither saved nor trained."""
    module.register_buffer(name, torch.tensor(make()), persistent=False)


def untrained(module: Module) -> None:
    """Declare that the parameters of ``module`` are not trained."""
    module.requires_grad_(False)
