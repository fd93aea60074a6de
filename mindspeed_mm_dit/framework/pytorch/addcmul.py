"""x + y * z with a cheaper gradient: that of torch.addcmul also multiplies y and z by a factor of 1."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def addcmul(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """Return x + y * z, with broadcasting."""
    # The compiler removes these products itself; on a CPU a gradient in Python costs more than they do.
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
