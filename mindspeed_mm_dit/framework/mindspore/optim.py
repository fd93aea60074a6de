"""AdamW and gradients, as training and the parity check both use them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter
from mindspore.experimental import optim

from mindspeed_mm_dit.framework.mindspore import runtime


def adamw(parameters: list[Parameter], betas: tuple[float, float], eps: float, weight_decay: float) -> optim.AdamW:
    """Return AdamW (Loshchilov & Hutter 2019) over ``parameters``; vectors and biases do not decay.

    Of MindSpore's own, this is the one that follows PyTorch's (1e-7 after five steps).
    """
    groups = [
        {"params": kind, "weight_decay": decay}
        for kind, decay in (
            ([p for p in parameters if p.ndim >= 2], weight_decay),
            ([p for p in parameters if p.ndim < 2], 0.0),
        )
        if kind
    ]
    return optim.AdamW(groups, lr=0.0, betas=betas, eps=eps)


def gradients(module: mindspore.nn.Cell, losses: Callable[[], Any]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    names, parameters = trained(module)
    values, found = _mean_gradients(parameters, losses)
    return runtime.to_host(values), {name: runtime.to_host(g) for name, g in zip(names, found)}


def adamw_step(
    module: mindspore.nn.Cell, losses: Callable[[], Any], lr: float, betas: tuple[float, float] = (0.9, 0.999)
) -> None:
    _, parameters = trained(module)
    optimizer = adamw(parameters, betas, 1e-8, 0.0)
    for group in optimizer.param_groups:
        group["lr"] = lr
    ordered = [p for group in optimizer.param_groups for p in group["params"]]
    # The optimizer is compiled: gradients that are not mutable would become constants of its graph.
    optimizer(tuple(mindspore.mutable(gradient) for gradient in _mean_gradients(ordered, losses)[1]))


def trained(module: mindspore.nn.Cell) -> tuple[list[str], list[Parameter]]:
    """Return names and parameters of what is trained."""
    found = [(name, p) for name, p in module.parameters_and_names() if p.requires_grad]
    return [name for name, _ in found], [p for _, p in found]


def _mean_gradients(parameters: list[Parameter], losses: Callable[[], Any]) -> tuple[Any, tuple[Any, ...]]:
    def forward() -> tuple[Any, Any]:
        values = losses()
        return values.mean(), values

    (_, values), found = mindspore.value_and_grad(forward, None, parameters, has_aux=True)()
    return values, found
