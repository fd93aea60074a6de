"""The trained parameters, grouped by the rule that steps them: one vector per rule, and a slice of it per worker.

A vector needs one reduction per step. It is padded with zeros so that it divides into equal slices; zeros stay zeros
under AdamW.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, ops

from mindspeed_mm_dit.checkpoint import power_ema
from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.framework.mindspore import runtime
from mindspeed_mm_dit.framework.mindspore.runtime import ON_CPU
from mindspeed_mm_dit.optimizers.contract import STEP, Rule
from mindspeed_mm_dit.optimizers.contract import Parameter as Declared
from mindspeed_mm_dit.training.mindspore.flat_optimizer import EachMatrix, FlatOptimizer
from mindspeed_mm_dit.training.mindspore.sharding import Shards

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class FlatLayout:
    """Where each parameter lies in the vector."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    shards: int
    """Number of slices that the vector divides into."""

    @property
    def sizes(self) -> list[int]:
        """Number of elements of each parameter."""
        return [math.prod(shape) for shape in self.shapes]

    @property
    def length(self) -> int:
        """Elements of the vector, padding included."""
        return -(-sum(self.sizes) // self.shards) * self.shards

    def vector(self, tensors: Sequence[Any]) -> Tensor:
        """Join tensors, in the order of the names, into a vector (length,) float32."""
        padding = ops.zeros(self.length - sum(self.sizes))
        return ops.cat([*(tensor.reshape((-1,)) for tensor in tensors), padding], 0)

    def assign(self, parameters: Sequence[Parameter], vector: Tensor) -> None:
        """Write a vector into the parameters, in place: a compiled graph keeps the memory it was compiled with."""
        parts = map(Tensor, self.cut(vector.asnumpy())) if ON_CPU else self.cut(vector)  # slicing there is 10 x slower
        for parameter, part in zip(parameters, parts):
            ops.assign(parameter, part)

    def cut(self, vector: Any) -> list[Any]:
        """Cut a vector (length,), tensor or array, into the shapes of the parameters, in the order of the names."""
        starts = itertools.accumulate(self.sizes, initial=0)
        return [
            vector[start : start + size].reshape(shape) for start, size, shape in zip(starts, self.sizes, self.shapes)
        ]

    def arrays(self, vector: np.ndarray) -> Arrays:
        """Cut a vector on the host into arrays by name."""
        return dict(zip(self.names, self.cut(vector)))

    def from_arrays(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """Join arrays by name into a vector on the host."""
        joined = np.concatenate([np.asarray(arrays[name], np.float32).ravel() for name in self.names])
        return np.pad(joined, (0, self.length - len(joined)))


def parts_of(
    parameters: Mapping[str, Parameter], declared: Mapping[str, Declared], args: RunConfig, shards: Shards
) -> list[Part]:
    """Return ``parameters``, as the predictor's config declares them, grouped by rule of the chosen optimizer."""
    chosen = args.chosen_optimizer()
    rules = {name: chosen.rule_of(declared[name]) for name in parameters}
    return [
        Part([name for name in parameters if rules[name] == rule], rule, parameters, declared, args, shards)
        for rule in dict.fromkeys(rules.values())
    ]


class Part:
    """The parameters that one rule steps: all of them as a vector, and this worker's slice of their state."""

    def __init__(
        self,
        names: Sequence[str],
        rule: Rule,
        parameters: Mapping[str, Parameter],
        declared: Mapping[str, Declared],
        args: RunConfig,
        shards: Shards,
    ) -> None:
        config = args.chosen_optimizer().config
        matrices = {name: _matrices(declared[name]) for name in names} if rule.update_matrices else {}
        self.names = tuple(sorted(names, key=lambda name: matrices[name][1:]) if matrices else names)
        self._numbers = [list(parameters).index(name) for name in self.names]
        self._parameters, self._rule, self._shards = [parameters[name] for name in self.names], rule, shards
        self._layout = FlatLayout(self.names, tuple(tuple(p.shape) for p in self._parameters), shards.count)
        self._matrices = EachMatrix(rule, config, _counted([matrices[n] for n in self.names])) if matrices else None
        decay = {n: np.full(p.shape, args.weight_decay if p.ndim >= 2 else 0.0) for n, p in parameters.items()}
        weights = {name: runtime.to_host(p) for name, p in zip(self.names, self._parameters)}
        local_weights, local_decay = (
            shards.local_slice(self._layout.from_arrays(arrays)) for arrays in (weights, decay)
        )
        self.optimizer = FlatOptimizer(
            rule,
            config,
            local_weights,
            local_decay,
            self._update_matrices if matrices else None,
            args.ema_decay,
            len(args.power_ema_stds),
        )

    def vector(self, gradients: Sequence[Any]) -> Tensor:
        """Join the gradients of this part, out of those of all parameters."""
        return self._layout.vector([gradients[number] for number in self._numbers])

    def step(self, gradient: Any, lr: float) -> None:
        """Take one step with ``gradient``, the whole vector, and let the parameters hold the new weights."""
        part = self.optimizer.step(self._shards.local_slice(gradient), lr)
        self._layout.assign(self._parameters, self._shards.gathered(part))

    def hold(self, vector: Any) -> None:
        """Let the parameters hold a vector of which this worker has a slice."""
        self._layout.assign(self._parameters, self._shards.gathered(vector.value()))

    def _update_matrices(self, change: Any, numbers: tuple[Any, ...]) -> Any:
        """Return the rule's result for this worker's slice: the change is gathered, and every worker computes all."""
        assert self._matrices is not None
        return self._shards.local_slice(self._matrices.make(self._shards.gathered(change), numbers))

    # --- state -------------------------------------------------------------------------------------------

    def trees(self) -> dict[str, Any]:
        """Return this worker's slice of the weights and of each EMA, by the trees of a checkpoint."""
        averages = self.optimizer.power_emas
        named = dict(zip(power_ema.trees(len(averages)), averages))
        return {"model": self.optimizer.weights, "ema": self.optimizer.average, **named}

    def arrays(self, vector: Any) -> Arrays:
        """Return a vector, of which this worker has a slice, as arrays by parameter; every worker must call this."""
        return self.named(runtime.to_host(self._shards.gathered(vector)))

    def named(self, vector: np.ndarray) -> Arrays:
        """Cut a whole vector, on the host, into arrays by parameter."""
        return self._layout.arrays(vector)

    def set(self, vector: Any, arrays: Arrays) -> None:
        """Write this worker's slice of ``arrays`` into a vector."""
        ops.assign(vector, Tensor(self._shards.local_slice(self._layout.from_arrays(arrays))))

    def optimizer_state(self) -> Arrays:
        """Return the state of the rule, as ``PARAMETER.NAME``; every worker must call this."""
        state = {f"{name}.{STEP}": np.array(self.optimizer.steps, np.float32) for name in self.names}
        for kind, vector in zip(self._rule.state, self.optimizer.rule_state):
            state |= {f"{name}.{kind}": array for name, array in self.arrays(vector).items()}
        return state

    def load_optimizer_state(self, arrays: Arrays) -> None:
        """Load the result of :meth:`optimizer_state`."""
        for kind, vector in zip(self._rule.state, self.optimizer.rule_state):
            self.set(vector, {name: arrays[f"{name}.{kind}"] for name in self.names})
        self.optimizer.steps = int(arrays[f"{self.names[0]}.{STEP}"])


def _matrices(declared: Declared) -> tuple[int, int, int]:
    """Return (n, rows, columns) of the matrices in a parameter."""
    return (declared.matrices, declared.shape[0] // declared.matrices, declared.shape[1])


def _counted(matrices: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Merge neighbours of the same shape, adding up their numbers."""
    by_shape = itertools.groupby(matrices, key=lambda matrix: matrix[1:])
    return [(sum(count for count, *_ in group), *shape) for shape, group in by_shape]
