"""Gradients and a step of AdamW for the parity check, and the list of trained parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, ops

from mindspeed_mm_dit.framework.mindspore import runtime
from mindspeed_mm_dit.optimizers import adam


def gradients(module: mindspore.nn.Cell, losses: Callable[[], Any]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    names, parameters = trained(module)
    values, grads = _mean_gradients(parameters, losses)
    return runtime.to_host(values), {name: runtime.to_host(g) for name, g in zip(names, grads)}


def adamw_step(
    module: mindspore.nn.Cell, losses: Callable[[], Any], lr: float, betas: tuple[float, float] = (0.9, 0.999)
) -> None:
    """Take one AdamW step (eps 1e-8, no decay) on the mean of the losses.

    It runs operator by operator: to compile a graph for this one step would take seconds.
    """
    _, parameters = trained(module)
    config = adam.AdamConfig(*betas)
    numbers = tuple(Tensor(np.float32(number)) for number in adam.RULE.numbers(config, lr, 1))
    for parameter, gradient in zip(parameters, _mean_gradients(parameters, losses)[1]):
        state = tuple(ops.zeros_like(gradient) for _ in adam.RULE.state)
        ops.assign(parameter, parameter - adam.RULE.change(config, gradient, state, numbers)[0])


def trained(module: mindspore.nn.Cell) -> tuple[list[str], list[Parameter]]:
    """Return the names of the trained parameters, and the parameters."""
    named = [(name, p) for name, p in module.parameters_and_names() if p.requires_grad]
    return [name for name, _ in named], [p for _, p in named]


def _mean_gradients(parameters: list[Parameter], losses: Callable[[], Any]) -> tuple[Any, tuple[Any, ...]]:
    def forward() -> tuple[Any, Any]:
        values = losses()
        return values.mean(), values

    (_, values), grads = mindspore.value_and_grad(forward, None, parameters, has_aux=True)()
    return values, grads
