"""One rule of the optimizer and the EMAs, applied to a vector and compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from mindspeed_mm_dit.checkpoint import power_ema
from mindspeed_mm_dit.optimizers.contract import Rule


class FlatOptimizer(nn.Cell):
    """Steps the parameters of one rule, then moves their EMAs.

    Args:
        config: settings of the optimizer.
        weights: (n,) float32, this worker's slice of the weights.
        decay: (n,) float32, the weight decay of each element; vectors and biases have 0.
        update_matrices: (this worker's change (n,), numbers of the rule) -> (n,); None: the rule is elementwise.
        power_emas: number of power-function EMAs (``checkpoint/power_ema.py``).
    """

    def __init__(
        self,
        rule: Rule,
        config: Any,
        weights: np.ndarray,
        decay: np.ndarray,
        update_matrices: Callable[[Any, tuple[Any, ...]], Any] | None,
        ema_decay: float,
        power_emas: int = 0,
    ) -> None:
        super().__init__()
        self.config, self._numbers, self._rule_change = config, rule.numbers, rule.change
        self._ema_rate = 1 - ema_decay  # (in a float32 graph, 1 - 0.9999 would have a relative error of 1e-4)
        self.steps = 0
        """Steps since the rule's state was zero."""
        self.decay = Tensor(decay)
        self.weights = Parameter(Tensor(weights), name="weights")
        self.average = Parameter(Tensor(weights), name="average")
        names = power_ema.trees(power_emas)
        self.power_emas = mindspore.ParameterTuple([Parameter(Tensor(weights), name=name) for name in names])
        zeros = np.zeros_like(weights)
        self.rule_state = mindspore.ParameterTuple([Parameter(Tensor(zeros), name=name) for name in rule.state])
        """The state of the rule, by the rule's names."""
        self._update_matrices = update_matrices
        self._compiled = mindspore.jit(self._step)
        self._compiled_change = mindspore.jit(self._change)
        self._compiled_take = mindspore.jit(self._take)
        self._compiled_move = mindspore.jit(self._move)

    def step(self, gradient: Any, lr: float) -> Any:
        """Take one step with ``gradient`` (n,) float32; return the new weights (n,)."""
        self.steps += 1
        numbers = tuple(Tensor(np.float32(x)) for x in self._numbers(self.config, lr, self.steps))
        rate = Tensor(np.float32(lr))
        if self._update_matrices is None:
            return self._compiled(gradient, rate, numbers)
        change = self._compiled_change(gradient, numbers)
        return self._compiled_take(self._update_matrices(change, numbers), rate)

    def move_power_emas(self, fractions: Sequence[float]) -> None:
        """Move each power-function EMA towards the weights, by its fraction in ``fractions``."""
        self._compiled_move(*(Tensor(np.float32(fraction)) for fraction in fractions))

    def _move(self, *fractions: Any) -> None:
        for average, fraction in zip(self.power_emas, fractions):
            ops.assign(average, average + fraction * (self.weights - average))

    def _step(self, gradient: Any, lr: Any, numbers: Any) -> Any:
        return self._take(self._change(gradient, numbers), lr)

    def _change(self, gradient: Any, numbers: Any) -> Any:
        results = self._rule_change(self.config, gradient, tuple(self.rule_state), numbers)
        for state, value in zip(self.rule_state, results[1:]):
            ops.assign(state, value)
        return results[0]

    def _take(self, change: Any, lr: Any) -> Any:
        weights = self.weights * (1 - lr * self.decay) - change
        ops.assign(self.average, self.average + self._ema_rate * (weights - self.average))
        ops.assign(self.weights, weights)
        return weights


class EachMatrix(nn.Cell):
    """Applies a rule to each matrix in a vector, compiled; matrices of one shape are computed together.

    Args:
        alike: (n, rows, columns) for the matrices of each shape, in the order of the vector; the rest is padding.
    """

    def __init__(self, rule: Rule, config: Any, alike: Sequence[tuple[int, int, int]]) -> None:
        super().__init__()
        assert rule.update_matrices is not None
        self.config, self.alike, self._rule_matrices = config, tuple(alike), rule.update_matrices
        self._compiled = mindspore.jit(self._make)

    def make(self, change: Any, numbers: tuple[Any, ...]) -> Any:
        """Return what is subtracted from the weights, (n,), from the whole ``change`` (n,)."""
        return self._compiled(change, numbers)

    def _make(self, change: Any, numbers: Any) -> Any:
        updates, start = [], 0
        for count, rows, columns in self.alike:
            end = start + count * rows * columns
            matrices = change[start:end].reshape(count, rows, columns)
            updates.append(self._rule_matrices(self.config, matrices, numbers).reshape(-1))
            start = end
        if start < change.shape[0]:
            updates.append(change[start:])
        return ops.cat(updates, 0)
