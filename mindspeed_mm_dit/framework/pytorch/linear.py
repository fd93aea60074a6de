"""Float32 linear layers on AMD CPUs: oneDNN is about twice as fast there as MKL.

On x86 PyTorch multiplies float32 matrices with Intel's MKL, which leaves AVX-512 unused on CPUs of other makers. oneDNN
uses it; PyTorch includes oneDNN too, for bfloat16. The results of the two differ by rounding, some 3e-7.
"""

from __future__ import annotations

import functools
import platform
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mindspeed_mm_dit.configs.parameters import Rule


class Linear(torch.nn.Linear):
    """PyTorch's linear layer, computed by the faster of its libraries."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, init: Rule | None = None, matrices: int = 1
    ) -> None:
        super().__init__(in_features, out_features, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b, (..., out_features), of x (..., in_features)."""
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b, (..., out); x: (..., in), weight: (out, in), bias: (out,)."""
    if torch.compiler.is_compiling():  # (first: the checks below would break the compiler's graph)
        return torch.nn.functional.linear(x, weight, bias)
    if onednn_is_faster() and _plain_float32(x, weight):
        return _OneDNN.apply(x, weight, bias)
    return torch.nn.functional.linear(x, weight, bias)


@functools.cache
def onednn_is_faster() -> bool:
    """Return whether this is a CPU whose AVX-512 MKL leaves unused; known on Linux only."""
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
