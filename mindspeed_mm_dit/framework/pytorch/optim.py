"""AdamW and gradients, as training and the parity check both use them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mindspeed_mm_dit.framework.pytorch.no_compiler import uncompiled
from mindspeed_mm_dit.framework.pytorch.sharded import is_sharded

AdamW = uncompiled(torch.optim.AdamW)


def split_by_kind(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return sharded and ordinary tensors apart: PyTorch's operations on lists want one kind at a time."""
    tensors = list(tensors)
    sharded = [x for x in tensors if is_sharded(x)]
    ordinary = [x for x in tensors if not is_sharded(x)]
    return [kind for kind in (sharded, ordinary) if kind]


def adamw(module: nn.Module, betas: tuple[float, float], eps: float, weight_decay: float) -> Optimizer:
    """Return AdamW (Loshchilov & Hutter 2019) over the trained parameters; vectors and biases do not decay."""
    trained = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": kind, "weight_decay": decay}
        for parameters, decay in (
            ([p for p in trained if p.ndim >= 2], weight_decay),
            ([p for p in trained if p.ndim < 2], 0.0),
        )
        for kind in split_by_kind(parameters)
    ]
    return AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=True)


def gradients(module: nn.Module, losses: Callable[[], Tensor]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the losses (B,) and the gradient of their mean by parameter name."""
    module.zero_grad()
    values = losses()
    values.mean().backward()
    found = {name: p.grad.numpy(force=True) for name, p in module.named_parameters() if p.grad is not None}
    return values.numpy(force=True), found


def adamw_step(
    module: nn.Module, losses: Callable[[], Tensor], lr: float, betas: tuple[float, float] = (0.9, 0.999)
) -> None:
    """Take one AdamW step (eps 1e-8, no decay) on the mean of the losses."""
    optimizer = adamw(module, betas, 1e-8, 0.0)
    for group in optimizer.param_groups:
        group["lr"] = lr
    gradients(module, losses)
    optimizer.step()
