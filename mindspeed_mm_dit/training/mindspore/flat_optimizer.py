"""The optimizer on MindSpore: a flat vector of parameters per rule, with the state of each worker's slice (ZeRO-1).

ZeRO: Rajbhandari et al. 2020. One rule and the EMAs are applied to a vector, compiled.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, communication, nn, ops

from mindspeed_mm_dit.checkpoint import power_ema
from mindspeed_mm_dit.configs.fsdp2 import Fsdp2Config
from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.framework.mindspore import runtime
from mindspeed_mm_dit.framework.mindspore.runtime import ON_CPU
from mindspeed_mm_dit.optimizers.contract import STEP, UpdateRule
from mindspeed_mm_dit.optimizers.contract import Parameter as Declared


def check(config: Fsdp2Config) -> None:
    """Raise ConfigError for a key of fsdp2.yaml that this backend does not support."""
    unsupported: dict[str, bool] = {
        "offload_to_cpu": config.offload_to_cpu,
        "recompute_modules": bool(config.recompute_modules),
        "ignored_modules": bool(config.ignored),
        "num_to_forward_prefetch": bool(config.num_to_forward_prefetch),
        "num_to_backward_prefetch": bool(config.num_to_backward_prefetch),
        "reshard_after_forward": not isinstance(config.reshard_after_forward, bool),
        "reduce_dtype": config.reduce_dtype not in (None, "fp32"),
        "output_dtype": config.output_dtype not in (None, "fp32"),
    }
    for key, is_set in unsupported.items():
        if is_set:
            raise ConfigError(
                f"{key} = {getattr(config, key)!r} in fsdp2.yaml does not work with --ai-framework mindspore, which "
                "shards only the optimizer's state, and keeps the weights whole on every worker. Leave the key out, "
                "or train with --ai-framework pytorch."
            )


@dataclass(frozen=True)
class ShardGroups:
    """The slice of the flat state that this worker holds, and how slices are joined."""

    count: int
    """Workers that share one copy of the state."""
    number: int
    """This worker's slice."""
    group: str | None
    """Name of the communication group of those workers; None if it is the only one."""

    @classmethod
    def create(cls, config: Fsdp2Config | None) -> ShardGroups:
        """Create the groups for ``sharding_size``; every worker must call this."""
        world = runtime.world_size()
        count = config.shard_ranks(world) if config else 1
        if count == 1:
            return cls(1, 0, None)
        if count == world:
            return cls(count, runtime.rank(), communication.GlobalComm.WORLD_COMM_GROUP)
        for start in range(0, world, count):
            communication.create_group(f"shards_{start}", list(range(start, start + count)))
        number = runtime.rank() % count
        return cls(count, number, f"shards_{runtime.rank() - number}")

    def local_slice(self, vector: Any) -> Any:
        """Return this worker's slice of a vector."""
        length = vector.shape[0] // self.count
        return vector[self.number * length : (self.number + 1) * length]

    def gathered(self, part: Tensor) -> Tensor:
        """Join the slices of all workers of the group."""
        if self.group is None:
            return part
        if self.group == communication.GlobalComm.WORLD_COMM_GROUP or runtime.device_type() != "cpu":
            return ops.AllGather(self.group)(part)
        # On a CPU only the group of all workers can gather: add up slices that are zero elsewhere.
        before, after = self.number * part.shape[0], (self.count - 1 - self.number) * part.shape[0]
        return ops.AllReduce(ops.ReduceOp.SUM, self.group)(ops.cat([ops.zeros(before), part, ops.zeros(after)], 0))


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


def group_parameters(
    parameters: Mapping[str, Parameter], declared: Mapping[str, Declared], args: RunConfig, shards: ShardGroups
) -> list[ParameterGroup]:
    """Return ``parameters``, as the predictor's config declares them, grouped by rule of the chosen optimizer."""
    chosen = args.chosen_optimizer()
    rules = {name: chosen.rule_of(declared[name]) for name in parameters}
    return [
        ParameterGroup([name for name in parameters if rules[name] == rule], rule, parameters, declared, args, shards)
        for rule in dict.fromkeys(rules.values())
    ]


class ParameterGroup:
    """The parameters that one rule steps: all of them as a vector, and this worker's slice of their state."""

    def __init__(
        self,
        names: Sequence[str],
        rule: UpdateRule,
        parameters: Mapping[str, Parameter],
        declared: Mapping[str, Declared],
        args: RunConfig,
        shards: ShardGroups,
    ) -> None:
        config = args.chosen_optimizer().config
        matrices = {name: _matrices(declared[name]) for name in names} if rule.update_matrices else {}
        self.names = tuple(sorted(names, key=lambda name: matrices[name][1:]) if matrices else names)
        self._numbers = [list(parameters).index(name) for name in self.names]
        self._parameters, self._rule, self._shards = [parameters[name] for name in self.names], rule, shards
        self._layout = FlatLayout(self.names, tuple(tuple(p.shape) for p in self._parameters), shards.count)
        self._matrices = MatrixUpdates(rule, config, _counted([matrices[n] for n in self.names])) if matrices else None
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
        named = dict(zip(power_ema.tree_names(len(averages)), averages))
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
        rule: UpdateRule,
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
        names = power_ema.tree_names(power_emas)
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

    def update_power_emas(self, fractions: Sequence[float]) -> None:
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


class MatrixUpdates(nn.Cell):
    """Applies a rule to each matrix in a vector, compiled; matrices of one shape are computed together.

    Args:
        alike: (n, rows, columns) for the matrices of each shape, in the order of the vector; the rest is padding.
    """

    def __init__(self, rule: UpdateRule, config: Any, alike: Sequence[tuple[int, int, int]]) -> None:
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
