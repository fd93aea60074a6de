"""Layers of the PyTorch backend: PyTorch's own, and for CPUs a linear layer by oneDNN and a fused modulation."""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import GELU, GroupNorm, Module, ModuleList, Sequential, SiLU

from mindspeed_mm_dit.configs.predictor import Initializer, Shape
from mindspeed_mm_dit.framework.pytorch.low_bit import PackedWeight, builds_without_weights


class Linear(torch.nn.Linear):
    """PyTorch's linear layer, computed by the faster of its libraries."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, init: Initializer | None = None, matrices: int = 1
    ) -> None:
        super().__init__(in_features, out_features, bias, device="meta" if builds_without_weights() else None)
        if bias and builds_without_weights():
            self.bias = torch.nn.Parameter(torch.zeros(out_features))

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b, (..., out_features), of x (..., in_features)."""
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b, (..., out); x: (..., in), weight: (out, in), perhaps in few bits, bias: (out,)."""
    if isinstance(weight, PackedWeight):
        return weight.product(x, bias)
    if torch.compiler.is_compiling():  # (first: the checks below would break the compiler's graph)
        return torch.nn.functional.linear(x, weight, bias)
    if onednn_is_faster() and _plain_float32(x, weight):
        return _OneDNN.apply(x, weight, bias)
    return torch.nn.functional.linear(x, weight, bias)


@functools.cache
def onednn_is_faster() -> bool:
    """Return whether this is a CPU whose AVX-512 MKL leaves unused; known on Linux only."""
    # A step is 1.7 times as fast on one AMD EPYC, 1.04 times on a Zen 4 (results/2026-11-22-train_throughput.md and
    # 2026-11-28-cpu_tuning.md in benchmarks).
    cpu = Path("/proc/cpuinfo")
    return (
        platform.machine() == "x86_64"
        and torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and cpu.exists()
        and "AuthenticAMD" in cpu.read_text()
    )


def _plain_float32(x: Tensor, weight: Tensor) -> bool:
    """Return whether both are ordinary float32 tensors on the CPU, multiplied eagerly and in full precision."""
    return (
        x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and type(x) in (Tensor, torch.nn.Parameter)
        and type(weight) in (Tensor, torch.nn.Parameter)
        and x.numel() > 0
        and not torch.is_autocast_enabled("cpu")
    )


class _OneDNN(torch.autograd.Function):
    """x W^T + b by oneDNN, with its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.save_for_forward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def jvp(ctx: Any, x: Tensor | None, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return the derivative along tangents of the inputs; None for inputs that stay constant."""
        saved_x, saved_weight = ctx.saved_tensors
        parts = [] if x is None else [_product(x, saved_weight)]
        parts += [] if weight is None else [_product(saved_x, weight)]
        parts += [] if bias is None else [bias.expand(*saved_x.shape[:-1], -1)]
        return sum(parts[1:], parts[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (x, weight), (grad_output,) = ctx.saved_tensors, gradients
        x_needs_grad, weight_needs_grad, bias_needs_grad = ctx.needs_input_grad
        rows = grad_output.reshape(-1, grad_output.shape[-1])  # (rows, out)
        return (
            _product(grad_output, weight.t()) if x_needs_grad else None,
            _product(rows.t(), x.reshape(-1, x.shape[-1]).t()) if weight_needs_grad else None,
            rows.sum(0) if bias_needs_grad else None,
        )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def addcmul(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """Return x + y * z, with broadcasting."""
    # torch.addcmul's gradient also multiplies by 1, 18 of 74 operators of a DiT block
    # (benchmarks/results/2026-11-28-cpu_tuning.md). The compiler removes them itself; on a CPU Python costs more.
    if torch.compiler.is_compiling() or x.device.type == "cpu":
        return torch.addcmul(x, y, z)
    return _AddCMul.apply(x, y, z)


class _AddCMul(torch.autograd.Function):
    """x + y * z with its gradients, bit for bit those of PyTorch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        _, y_needs_grad, z_needs_grad = ctx.needs_input_grad
        ctx.save_for_backward(y if z_needs_grad else None, z if y_needs_grad else None)
        ctx.save_for_forward(y, z)
        result = torch.addcmul(x, y, z)
        ctx.shapes, ctx.shape = (x.shape, y.shape, z.shape), result.shape
        return result

    @staticmethod
    def jvp(ctx: Any, x: Tensor | None, y: Tensor | None, z: Tensor | None) -> Tensor:
        """Return the derivative along tangents of the inputs; None for inputs that stay constant."""
        saved_y, saved_z = ctx.saved_tensors
        parts = [] if x is None else [x]
        parts += [] if y is None else [y * saved_z]
        parts += [] if z is None else [saved_y * z]
        return sum(parts[1:], parts[0]).expand(ctx.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (y, z), (g,) = ctx.saved_tensors, gradients
        x_needs_grad, y_needs_grad, z_needs_grad = ctx.needs_input_grad
        shape_x, shape_y, shape_z = ctx.shapes
        return (
            g.sum_to_size(shape_x) if x_needs_grad else None,
            (g * z).sum_to_size(shape_y) if y_needs_grad else None,
            (g * y).sum_to_size(shape_z) if z_needs_grad else None,
        )


class Blocks(ModuleList):
    """The blocks of a network."""


class Conv2d(torch.nn.Conv2d):
    """PyTorch's convolution."""

    def __init__(self, *sizes: int, init: Initializer | None = None, **options: Any) -> None:
        super().__init__(*sizes, **options)


class Embedding(torch.nn.Embedding):
    """PyTorch's table."""

    def __init__(self, num_embeddings: int, embedding_dim: int, init: Initializer | None = None) -> None:
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


def parameter(
    shape: Shape, init: Initializer | None = None, trained: bool = True, matrices: int = 0
) -> torch.nn.Parameter:
    """Return a parameter of a module. Its values come later, unless it is not trained and ``init`` is a function."""
    value = torch.zeros(shape) if trained or not callable(init) else torch.tensor(init(np.random.default_rng(0), shape))
    return torch.nn.Parameter(value, requires_grad=trained)


def set_constant(module: Module, name: str, shape: Shape, make: Callable[[], np.ndarray]) -> None:
    """Give ``module`` a tensor that moves with it and is neither saved nor trained."""
    module.register_buffer(name, torch.tensor(make()), persistent=False)


def freeze_parameters(module: Module) -> None:
    """Declare that the parameters of ``module`` are not trained."""
    module.requires_grad_(False)
