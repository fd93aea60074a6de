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
from mindspeed_mm_dit.framework.pytorch.low_bit import packed_weights
from mindspeed_mm_dit.framework.pytorch.optim import groups, local, native_optimizer, part_of, split_by_kind, whole_of
from mindspeed_mm_dit.optimizers.contract import STEP, ConfiguredOptimizer, Parameter, UpdateRule
from mindspeed_mm_dit.training.contract import RunState
from mindspeed_mm_dit.training.pytorch.class_optimizer import ClassStepper


class OptimizersContainer:
    """The optimizer of a run: PyTorch's own for each rule that has one, else the rule itself.

    Args:
        module: the network; its tensors may be sharded.
        declared: the config's declaration of each parameter, by name.
        lr_scales: factors of the learning rate, for some parameters.
    """

    switches = False
    """Whether gradients are taken at other weights than those to use."""

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

    def train(self) -> None:
        """Set the weights to those at which gradients are taken; called only if the optimizer ``switches``."""

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

    def prepare(self, stored: Mapping[str, tuple[int, ...]]) -> None:
        """Create the state to load into: :meth:`state` does."""

    def restore(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over what no tensor holds: nothing."""


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
        before = tuple(local(state[name]) for name in rule.state)
        change, *after = rule.change(self._config, local(p.grad), before, numbers)
        for name, value in zip(rule.state, after):
            local(state[name]).copy_(value)
        if rule.update_matrices is not None:
            whole = whole_of(change, p)
            parts = whole.reshape(self._matrices[p], -1, whole.shape[-1])  # (n, rows, columns)
            change = part_of(rule.update_matrices(self._config, parts, numbers).reshape(whole.shape), p)
        local(p).mul_(1 - lr * decay).sub_(change)


def zero_state(p: Tensor, rule: UpdateRule) -> dict[str, Tensor]:
    """Return a parameter's state before its first step; PyTorch's fused optimizers count steps on the device."""
    step = torch.zeros((), dtype=torch.float32, device=p.device if rule.pytorch else "cpu")
    return {STEP: step, **{name: torch.zeros_like(p) for name in rule.state}}


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
        chosen = args.chosen_optimizer()
        self.optimizer: OptimizersContainer | ClassStepper = (
            ClassStepper(predictor, chosen, args.weight_decay)
            if chosen.is_class
            else OptimizersContainer(predictor, declared, chosen, args.weight_decay, lr_scales or {})
        )
        trained = {name: p for name, p in predictor.named_parameters() if p.requires_grad}
        self.ema = ExponentialMovingAverage(trained, args.ema_decay)
        self.power_ema = PowerEmas(trained, len(args.power_ema_stds))
        self._base_names = {name for name, p in declared.items() if not p.saved}
        self._packed = packed_weights(predictor)

    def state(self, with_optimizer: bool = True) -> checkpoints.State:
        """Return every tensor a resumed run needs, by its name in the checkpoint; the tensors are the live ones."""
        weights = {name: p.detach() for name, p in self._saved()}
        averages = {"ema": self.ema.averages, **self.power_ema.state()}
        state: checkpoints.State = {
            "model": weights,
            **{tree: {**weights, **moved} for tree, moved in averages.items()},  # a frozen weight equals its EMA
        }
        if with_optimizer and (moments := self.optimizer.state()):
            state["optimizer"] = {"state": moments}
        return state

    def load(self, path: Path, with_optimizer: bool) -> None:
        checkpoints.check_architecture(path, {name: tuple(p.shape) for name, p in self._saved()})
        if with_optimizer:
            self.optimizer.prepare(checkpoints.shapes(path))
        state, has_power_ema = self.state(with_optimizer), power_ema.STDS in read_facts(path)
        if not has_power_ema:
            state = {tree: tensors for tree, tensors in state.items() if tree not in self.power_ema.state()}
        checkpoints.read(state, path)
        if with_optimizer:
            self.optimizer.restore(state["optimizer"]["state"])
        if not has_power_ema:
            self.power_ema.begin()

    def _saved(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters that checkpoints hold."""
        return ((name, p) for name, p in self.predictor.named_parameters() if self._is_saved(name))

    def _is_saved(self, name: str) -> bool:
        return name not in self._base_names and name.rpartition(".")[0] not in self._packed

    def num_parameters(self) -> int:
        """Return the number of parameters of the predictor, over all shards."""
        packed = sum(math.prod(weight.shape) for weight in self._packed.values())
        others = (p for name, p in self.predictor.named_parameters() if name.rpartition(".")[0] not in self._packed)
        return packed + sum(p.numel() for p in others)
