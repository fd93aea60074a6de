"""AdamW and the moving averages on one vector, compiled to a single graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from mindspeed_mm_dit.checkpoint import power_ema


class FlatAdamW(nn.Cell):
    """AdamW (Loshchilov & Hutter 2019) in PyTorch's order of operations, then the moving averages.

    Args:
        weights: (n,) float32, this worker's slice of the weights.
        decay: (n,) float32, the weight decay of each element; vectors and biases have 0.
        power_averages: how many averages there are over a share of the run (``checkpoint/power_ema.py``).
    """

    def __init__(
        self,
        weights: np.ndarray,
        decay: np.ndarray,
        betas: tuple[float, float],
        eps: float,
        ema_decay: float,
        power_averages: int = 0,
    ) -> None:
        super().__init__()
        self.beta1, self.beta2, self.eps, self.ema_decay = *betas, eps, ema_decay
        self.steps = 0
        """Since the moments were zero."""
        self.decay = Tensor(decay)
        self.weights = Parameter(Tensor(weights), name="weights")
        self.average = Parameter(Tensor(weights), name="average")
        names = power_ema.trees(power_averages)
        self.power_averages = mindspore.ParameterTuple([Parameter(Tensor(weights), name=name) for name in names])
        self.exp_avg = Parameter(Tensor(np.zeros_like(weights)), name="exp_avg")
        self.exp_avg_sq = Parameter(Tensor(np.zeros_like(weights)), name="exp_avg_sq")
        self._compiled = mindspore.jit(self._update)
        self._moved = mindspore.jit(self._move)

    def step(self, gradient: Any, lr: float) -> Any:
        """Take one step with ``gradient`` (n,) float32; return the new weights (n,)."""
        self.steps += 1
        step_size = lr / (1 - self.beta1**self.steps)
        root_of_correction = (1 - self.beta2**self.steps) ** 0.5
        scalars = (Tensor(np.float32(value)) for value in (lr, step_size, root_of_correction))
        return self._compiled(gradient, *scalars)

    def move_power_averages(self, shares: Sequence[float]) -> None:
        """Move each of the power averages this share of the way to the weights."""
        self._moved(*(Tensor(np.float32(share)) for share in shares))

    def _move(self, *shares: Any) -> None:
        for average, share in zip(self.power_averages, shares):
            ops.assign(average, average + share * (self.weights - average))

    def _update(self, gradient: Any, lr: Any, step_size: Any, root_of_correction: Any) -> Any:
        exp_avg = self.exp_avg + (1 - self.beta1) * (gradient - self.exp_avg)
        exp_avg_sq = self.beta2 * self.exp_avg_sq + (1 - self.beta2) * gradient * gradient
        weights = self.weights * (1 - lr * self.decay)
        weights = weights - step_size * exp_avg / (ops.sqrt(exp_avg_sq) / root_of_correction + self.eps)
        ops.assign(self.exp_avg, exp_avg)
        ops.assign(self.exp_avg_sq, exp_avg_sq)
        ops.assign(self.average, self.average + (1 - self.ema_decay) * (weights - self.average))
        ops.assign(self.weights, weights)
        return weights
