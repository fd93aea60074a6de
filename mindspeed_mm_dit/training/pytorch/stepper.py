"""The trained part of a network.

Its weights, their optimizer and their EMAs, sharded alike, as a checkpoint stores them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from mindspeed_mm_dit.checkpoint import power_ema
from mindspeed_mm_dit.checkpoint import torch_dcp as checkpoints
from mindspeed_mm_dit.checkpoint.store import read_facts
from mindspeed_mm_dit.configs.predictor import ParameterSpec as NetworkParameter
from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.framework.pytorch.optim import groups, is_sharded, native_optimizer, split_by_kind
from mindspeed_mm_dit.optimizers.contract import STEP, ConfiguredOptimizer, Parameter, UpdateRule
from mindspeed_mm_dit.training.contract import RunState


class OptimizersContainer:
    """The optimizer of a run: PyTorch's own for each rule that has one, else the rule itself.

    Args:
        module: the network; its tensors may be sharded.
        declared: the config's declaration of each parameter, by name.
        lr_scales: factors of the learning rate, for some parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        declared: Mapping[str, Parameter],
        chosen: ConfiguredOptimizer,
        weight_decay: float,
        lr_scales: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self._trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._rules = {name: chosen.rule_of(declared[name]) for name in self._trained}
        self.optimizers: list[torch.optim.Optimizer] = []
        """One for each rule and factor of the learning rate."""
        self._scales: list[float] = []
        self._owners: dict[str, torch.optim.Optimizer] = {}
        kinds = {name: (rule, lr_scales.get(name, 1.0)) for name, rule in self._rules.items()}
        for rule, scale in dict.fromkeys(kinds.values()):
            names = [name for name in self._trained if kinds[name] == (rule, scale)]
            param_groups = groups((self._trained[name] for name in names), weight_decay)
            matrices = {self._trained[name]: declared[name].matrices for name in names}
            optimizer = (
                native_optimizer(rule, chosen.config, param_groups)
                if rule.pytorch
                else RuleOptimizer(chosen.config, rule, param_groups, matrices)
            )
            self.optimizers.append(optimizer)
            self._scales.append(scale)
            self._owners |= dict.fromkeys(names, optimizer)

    def step(self, lr: float) -> None:
        """Step by the present gradients, and drop them."""
        for optimizer, scale in zip(self.optimizers, self._scales):
            for group in optimizer.param_groups:
                group["lr"] = lr * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the state of each parameter, by the names of the checkpoint; the tensors are the live ones.

        State that an optimizer would only create in its first step is created now, as zeros, to be loaded into.
        """
        states = {}
        for name, p in self._trained.items():
            state = self._owners[name].state
            if not state[p]:
                state[p] = zero_state(p, self._rules[name])
            states[name] = state[p]
        return states


class RuleOptimizer(torch.optim.Optimizer):
    """Applies one rule, as its file defines it.

    If a parameter is sharded, the rule sees this rank's elements. For a rule of whole matrices the change is gathered,
    one matrix at a time; every rank computes the same and keeps its shard. Among n ranks, a rank sends
    (n - 1) / n of 4 bytes for each element.

    Args:
        matrices: number of matrices in each parameter.
    """

    def __init__(
        self, config: Any, rule: UpdateRule, groups: list[dict[str, Any]], matrices: Mapping[Tensor, int]
    ) -> None:
        super().__init__(groups, {"lr": 0.0})
        self._config, self._rule, self._matrices = config, rule, dict(matrices)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step(p, group["lr"], group["weight_decay"])

    def _step(self, p: Tensor, lr: float, decay: float) -> None:
        rule, state = self._rule, self.state[p]
        if not state:
            state.update(zero_state(p, rule))
        state[STEP] += 1
        numbers = rule.numbers(self._config, lr, int(state[STEP]))
        before = tuple(_local(state[name]) for name in rule.state)
        change, *after = rule.change(self._config, _local(p.grad), before, numbers)
        for name, value in zip(rule.state, after):
            _local(state[name]).copy_(value)
        if rule.update_matrices is not None:
            whole = _whole(change, p)
            parts = whole.reshape(self._matrices[p], -1, whole.shape[-1])  # (n, rows, columns)
            change = _part(rule.update_matrices(self._config, parts, numbers).reshape(whole.shape), p)
        _local(p).mul_(1 - lr * decay).sub_(change)


def zero_state(p: Tensor, rule: UpdateRule) -> dict[str, Tensor]:
    """Return a parameter's state before its first step; PyTorch's fused optimizers count steps on the device."""
    step = torch.zeros((), dtype=torch.float32, device=p.device if rule.pytorch else "cpu")
    return {STEP: step, **{name: torch.zeros_like(p) for name in rule.state}}


def _local(tensor: Any) -> Tensor:
    """Return this rank's elements."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def _whole(part: Tensor, p: Any) -> Tensor:
    """Gather the tensor with elements ``part`` here, sharded like ``p``, on the device that communicates."""
    if not is_sharded(p):
        return part
    from torch.distributed.tensor import DTensor

    part = part.to(p.device_mesh.device_type)  # (offload_to_cpu keeps it elsewhere)
    return DTensor.from_local(part, p.device_mesh, p.placements, shape=p.shape, stride=p.stride()).full_tensor()


def _part(whole: Tensor, p: Any) -> Tensor:
    """Return this rank's elements of a tensor that is whole on every rank, without communication."""
    if not is_sharded(p):
        return whole
    from torch.distributed.tensor import DTensor, Replicate

    alike = DTensor.from_local(whole, p.device_mesh, [Replicate()] * p.device_mesh.ndim, run_check=False)
    return alike.redistribute(placements=p.placements).to_local().to(_local(p).device)


class ExponentialMovingAverage:
    """EMA in float32: average <- decay * average + (1 - decay) * weights, after every optimizer step."""

    def __init__(self, parameters: Mapping[str, Tensor], decay: float) -> None:
        self.decay = decay
        self._parameters = dict(parameters)
        self.averages = {name: _full(p.detach()).clone() for name, p in self._parameters.items()}

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """While entered, the parameters hold the EMA; afterwards both are bit for bit what they were."""
        weights = {name: p.detach().clone() for name, p in self._parameters.items()}
        self._set(self.averages)
        try:
            yield
        finally:
            self._set(weights)

    @torch.no_grad()
    def _set(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(values[name])

    def update(self) -> None:
        """Move towards the present weights by 1 - decay."""
        self.move(1 - self.decay)

    @torch.no_grad()
    def move(self, fraction: float) -> None:
        """Move by ``fraction`` of the distance to the present weights; 1 is all of it."""
        weights = map(_full, self._parameters.values())
        kinds = (split_by_kind(tensors) for tensors in (self.averages.values(), weights))
        for averages, weights in zip(*kinds):
            torch._foreach_lerp_(averages, weights, fraction)


def _full(tensor: Tensor) -> Tensor:
    """Return a tensor in float32; float64 stays float64."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


class PowerEmas:
    """``count`` power-function EMAs (``checkpoint/power_ema.py``)."""

    def __init__(self, parameters: Mapping[str, Tensor], count: int) -> None:
        self._averages = [ExponentialMovingAverage(parameters, decay=0.0) for _ in range(count)]

    def move(self, fractions: Sequence[float]) -> None:
        """Move each EMA towards the present weights, by its fraction in ``fractions``."""
        for average, fraction in zip(self._averages, fractions):
            average.move(fraction)

    def begin(self) -> None:
        """Start from the present weights, as if all steps so far had had them."""
        for average in self._averages:
            average.move(1.0)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the EMAs, by their names in the checkpoint; the tensors are the live ones."""
        names = power_ema.tree_names(len(self._averages))
        return {name: dict(average.averages) for name, average in zip(names, self._averages)}


class TrainState(RunState):
    """A predictor spread over the ranks, its optimizer and its EMAs, which begin with its weights.

    declared: the config's declaration of each parameter. lr_scales: factors of the learning rate, for some parameters.
    """

    def __init__(
        self,
        predictor: nn.Module,
        declared: Mapping[str, NetworkParameter],
        args: RunConfig,
        lr_scales: Mapping[str, float] | None = None,
    ) -> None:
        self.predictor = predictor
        self.optimizer = OptimizersContainer(
            predictor, declared, args.chosen_optimizer(), args.weight_decay, lr_scales or {}
        )
        trained = {name: p for name, p in predictor.named_parameters() if p.requires_grad}
        self.ema = ExponentialMovingAverage(trained, args.ema_decay)
        self.power_ema = PowerEmas(trained, len(args.power_ema_stds))
        self._declared = declared

    def state(self, with_optimizer: bool = True) -> checkpoints.State:
        """Return every tensor a resumed run needs, by its name in the checkpoint; the tensors are the live ones."""
        weights = {name: p.detach() for name, p in self._saved()}
        averages = {"ema": self.ema.averages, **self.power_ema.state()}
        state: checkpoints.State = {
            "model": weights,
            **{tree: {**weights, **moved} for tree, moved in averages.items()},  # a frozen weight equals its EMA
        }
        if with_optimizer:
            state["optimizer"] = {"state": self.optimizer.state()}
        return state

    def load(self, path: Path, with_optimizer: bool) -> None:
        checkpoints.check_architecture(path, {name: tuple(p.shape) for name, p in self._saved()})
        state, has_power_ema = self.state(with_optimizer), power_ema.STDS in read_facts(path)
        if not has_power_ema:
            state = {tree: tensors for tree, tensors in state.items() if tree not in self.power_ema.state()}
        checkpoints.read(state, path)
        if not has_power_ema:
            self.power_ema.begin()

    def _saved(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters that checkpoints hold."""
        return ((name, p) for name, p in self.predictor.named_parameters() if self._is_saved(name))

    def _is_saved(self, name: str) -> bool:
        return name in self._declared and self._declared[name].saved

    def num_parameters(self) -> int:
        """Return the number of parameters of the predictor, over all shards."""
        return sum(math.prod(p.shape) for p in self._declared.values())
