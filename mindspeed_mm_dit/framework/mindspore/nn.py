"""Layers: MindSpore cells with PyTorch's names, so that one model source and one state dict serve both.

Weights start at zero (norms: at one); ``models/init.py`` or a checkpoint gives them their values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, mint
from mindspore import nn as msnn
from mindspore import ops as msops
from mindspore.nn import CellList as ModuleList
from mindspore.nn import SequentialCell as Sequential

from mindspeed_mm_dit.configs.predictor import Initializer, Shape
from mindspeed_mm_dit.framework.mindspore.ops import linear
from mindspeed_mm_dit.framework.mindspore.runtime import ON_CPU

GELU_LINEAR = 2 * math.sqrt(2 / math.pi)
GELU_CUBIC = 0.044715 * GELU_LINEAR

__all__ = [
    "GELU",
    "Blocks",
    "Conv2d",
    "Embedding",
    "GroupNorm",
    "LayerNorm",
    "Linear",
    "Module",
    "ModuleList",
    "RMSNorm",
    "Sequential",
    "SiLU",
    "freeze_parameters",
    "parameter",
    "set_constant",
]


class Module(msnn.Cell):
    """Base class; subclasses write ``forward``, which MindSpore knows as ``construct``."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "forward" in cls.__dict__:
            cls.construct = cls.__dict__["forward"]  # the same function: ms.jit compiles its source

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield (state-dict name, parameter), frozen ones included."""
        return iter(self.parameters_and_names())

    def named_modules(self) -> Iterator[tuple[str, msnn.Cell]]:
        """Yield (dotted name, module) of this module ("") and all within it."""
        return self.cells_and_names()


class Blocks(ModuleList):
    """The blocks of a network."""


class Linear(Module):
    """x W^T + b: (..., in_features) -> (..., out_features)."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, init: Initializer | None = None, matrices: int = 1
    ) -> None:
        super().__init__()
        self.weight = _zeros(out_features, in_features)
        self.bias = _zeros(out_features) if bias else None

    def forward(self, x: Any) -> Any:
        return linear(x, self.weight, self.bias)


class Conv2d(Module):
    """Cross-correlation: (B, in_channels, H, W) -> (B, out_channels, H', W')."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        padding: int = 0,
        bias: bool = True,
        init: Initializer | None = None,
    ) -> None:
        super().__init__()
        self.stride, self.padding = stride, padding
        self.weight = _zeros(out_channels, in_channels, kernel_size, kernel_size)
        self.bias = _zeros(out_channels) if bias else None

    def forward(self, x: Any) -> Any:
        if ON_CPU:
            x = _conv2d_by_product(x, self.weight, self.stride, self.padding)
            return x if self.bias is None else x + self.bias[:, None, None]
        return msops.conv2d(x, self.weight, self.bias, stride=self.stride, pad_mode="pad", padding=self.padding)


def _conv2d_by_product(x: Any, weight: Any, stride: int, padding: int) -> Any:
    """Compute a convolution by unfolding and one matrix product: tens of times as fast as the CPU kernel."""
    (B, C, H, W), (out_channels, _, K, _) = x.shape, weight.shape
    h, w = (H + 2 * padding - K) // stride + 1, (W + 2 * padding - K) // stride + 1
    columns = msops.unfold(x, K, 1, padding, stride).reshape((B, C * K * K, h * w))
    product = msops.matmul(weight.reshape((out_channels, -1)), columns)  # (B, out_channels, h * w)
    return product.reshape((B, out_channels, h, w))


class Embedding(Module):
    """Rows of a table: (...) int -> (..., width)."""

    def __init__(self, num_embeddings: int, embedding_dim: int, init: Initializer | None = None) -> None:
        super().__init__()
        self.weight = _zeros(num_embeddings, embedding_dim)

    def forward(self, index: Any) -> Any:
        return msops.gather(self.weight, index, 0)


class LayerNorm(Module):
    """Zero mean and unit variance over the last axis, then weight and bias if ``elementwise_affine``."""

    def __init__(self, width: int, eps: float = 1e-5, elementwise_affine: bool = True) -> None:
        super().__init__()
        self.norm = msops.LayerNorm(begin_norm_axis=-1, begin_params_axis=-1, epsilon=eps)
        gain, shift = np.ones(width, np.float32), np.zeros(width, np.float32)
        if elementwise_affine:
            self.weight, self.bias = Parameter(Tensor(gain)), Parameter(Tensor(shift))
        else:  # the operator needs both
            self.weight, self.bias = Tensor(gain), Tensor(shift)

    def forward(self, x: Any) -> Any:
        return self.norm(x, self.weight.astype(x.dtype), self.bias.astype(x.dtype))[0]


class RMSNorm(Module):
    """x / root mean square over the last axis, times weight (Zhang & Sennrich 2019)."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps, self.weight = eps, Parameter(Tensor(np.ones(width, np.float32)))

    def forward(self, x: Any) -> Any:
        mean_square = msops.mean(x * x, -1, True)
        return x * msops.rsqrt(mean_square + self.eps) * self.weight.astype(x.dtype)


class GroupNorm(Module):
    """Zero mean and unit variance over each group of channels of (B, C, H, W), then weight and bias."""

    def __init__(self, num_groups: int, num_channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.num_groups, self.eps = num_groups, eps
        self.weight, self.bias = Parameter(Tensor(np.ones(num_channels, np.float32))), _zeros(num_channels)

    def forward(self, x: Any) -> Any:
        return msops.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)


class SiLU(Module):
    """x * sigmoid(x)."""

    def forward(self, x: Any) -> Any:
        return msops.silu(x)


class GELU(Module):
    """x * Phi(x), exactly ("none") or by its tanh approximation ("tanh")."""

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = approximate

    def forward(self, x: Any) -> Any:
        if not ON_CPU:
            return mint.nn.functional.gelu(x, approximate=self.approximate)  # Ascend's fast form; untested there
        if self.approximate == "tanh":
            return _gelu_by_sigmoid(x)
        return msops.gelu(x, approximate=self.approximate)


def _gelu_by_sigmoid(x: Any) -> Any:
    """x * (1 + tanh u) / 2 as x * sigmoid(2 u) (Hendrycks & Gimpel 2016): 7 times as fast as the CPU kernel."""
    return x * msops.sigmoid(x * (GELU_LINEAR + GELU_CUBIC * x * x))


def parameter(shape: Shape, init: Initializer | None = None, trained: bool = True, matrices: int = 0) -> Parameter:
    value = np.zeros(shape, np.float32) if trained or not callable(init) else init(np.random.default_rng(0), shape)
    return Parameter(Tensor(value), requires_grad=trained)


def set_constant(module: Module, name: str, shape: Shape, make: Callable[[], np.ndarray]) -> None:
    """Give ``module`` a tensor that is neither saved nor trained."""
    setattr(module, name, Tensor(make()))


def freeze_parameters(module: msnn.Cell) -> None:
    """Declare that the parameters of ``module`` are not trained."""
    for parameter in module.get_parameters():
        parameter.requires_grad = False


def _zeros(*shape: int) -> Parameter:
    return Parameter(Tensor(np.zeros(shape, np.float32)))
