"""Layers: PyTorch's own or subclasses of them, so that torch.compile, FSDP2 and hooks see ordinary modules."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import (
    GELU,
    Conv2d,
    Embedding,
    GroupNorm,
    Module,
    ModuleList,
    RMSNorm,
    Sequential,
    SiLU,
)

from mindspeed_mm_dit.framework.pytorch.linear import Linear


class LayerNorm(torch.nn.LayerNorm):
    """PyTorch's LayerNorm, in float32 under autocast on a CPU as well.

    On a GPU autocast itself lets it compute in float32. On a CPU it does not, and the kernel adds up the gradients of
    the weights in bfloat16: where many cancel, a quarter of the sum is lost.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Norm ``input`` over its last axis."""
        return super().forward(input if self.weight is None else input.to(self.weight.dtype))


__all__ = [
    "BACKWARD_HOOK", "GELU", "Conv2d", "Embedding", "GroupNorm", "LayerNorm", "Linear", "Module", "ModuleList",
    "RMSNorm", "Sequential", "SiLU", "frozen_parameter", "parameter", "set_constant",
]  # fmt: skip

BACKWARD_HOOK = "register_full_backward_hook"


def parameter(shape: tuple[int, ...]) -> torch.nn.Parameter:
    """Return a trained parameter of a module; the values come later."""
    return torch.nn.Parameter(torch.zeros(shape))


def frozen_parameter(array: np.ndarray) -> torch.nn.Parameter:
    """Return a parameter that is saved with the model and never trained."""
    return torch.nn.Parameter(torch.tensor(array), requires_grad=False)


def set_constant(module: Module, name: str, array: np.ndarray) -> None:
    """Give ``module`` a tensor that moves with it and is neither saved nor trained."""
    module.register_buffer(name, torch.tensor(array), persistent=False)
