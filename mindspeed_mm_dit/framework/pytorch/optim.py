"""Gradients and optimizer steps, for training and the parity check."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mindspeed_mm_dit.optimizers import adam
from mindspeed_mm_dit.optimizers.contract import UpdateRule


def is_sharded(x: Any) -> bool:
    """Return whether ``x`` is a DTensor; false as long as DTensor has not been imported."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(x, tensors.DTensor)


def is_fsdp(module: Any) -> bool:
    """Return whether FSDP2 shards the parameters of ``module``."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def split_by_kind(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Separate sharded from ordinary tensors: PyTorch's operations on lists take one kind at a time."""
    tensors = list(tensors)
    sharded = [x for x in tensors if is_sharded(x)]
    ordinary = [x for x in tensors if not is_sharded(x)]
    return [kind for kind in (sharded, ordinary) if kind]


_UNCOMPILED = "__dynamo_disable"
"""Attribute in which PyTorch stores the variant of a method that its compiler skips."""


def avoid_compiler_import() -> None:
    """Let optimizers be created, saved and loaded without importing ``torch._dynamo``.

    That import takes as long as all the rest of PyTorch, and no variable prevents it
    (benchmarks/results/2026-11-28-cpu_tuning.md).
    """
    for name in ("add_param_group", "state_dict", "load_state_dict", "zero_grad"):
        method = getattr(getattr(Optimizer, name), "__wrapped__", None)
        if method is not None and not hasattr(method, _UNCOMPILED):
            setattr(method, _UNCOMPILED, method)


def uncompiled(kind: type[Optimizer]) -> type[Optimizer]:
    """Return the optimizer ``kind`` with a step of the same results that does not import ``torch._dynamo``."""
    plain = inspect.unwrap(kind.step)

    def step(self: Optimizer, closure: Any = None) -> Any:
        with torch.no_grad():
            return plain(self, closure)

    return type(kind.__name__, (kind,), {"step": step})


def groups(parameters: Iterable[Tensor], weight_decay: float) -> list[dict[str, Any]]:
    """Return the groups of an optimizer over ``parameters``: vectors and biases do not decay."""
    trained = list(parameters)
    return [
        {"params": kind, "weight_decay": decay}
        for parameters, decay in (
            ([p for p in trained if p.ndim >= 2], weight_decay),
            ([p for p in trained if p.ndim < 2], 0.0),
        )
        for kind in split_by_kind(parameters)
    ]


def native_optimizer(rule: UpdateRule, config: Any, groups: list[dict[str, Any]]) -> Optimizer:
    """Return PyTorch's own optimizer for ``rule`` over ``groups``."""
    assert rule.pytorch is not None
    name, settings = rule.pytorch(config)
    return uncompiled(getattr(torch.optim, name))(groups, lr=0.0, **settings)


def gradients(module: nn.Module, losses: Callable[[], Tensor]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the losses (B,) and the gradient of their mean by parameter name."""
    module.zero_grad()
    values = losses()
    values.mean().backward()
    grads = {name: p.grad.numpy(force=True) for name, p in module.named_parameters() if p.grad is not None}
    return values.numpy(force=True), grads


def adamw_step(
    module: nn.Module, losses: Callable[[], Tensor], lr: float, betas: tuple[float, float] = (0.9, 0.999)
) -> None:
    """Take one AdamW step (eps 1e-8, no decay) on the mean of the losses."""
    trained = groups((p for p in module.parameters() if p.requires_grad), 0.0)
    optimizer = native_optimizer(adam.RULE, adam.AdamConfig(*betas), trained)
    for group in optimizer.param_groups:
        group["lr"] = lr
    gradients(module, losses)
    optimizer.step()
