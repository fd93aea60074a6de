"""The optimizer of a run that names a class, ``--optimizer module:Class``.

The class steps the parameters as they are. If they are sharded (FSDP2) and the class does not step shards as it steps
whole tensors, every rank steps the whole ones, all alike, and keeps its shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mindspeed_mm_dit.framework.pytorch import optimizer_state, runtime
from mindspeed_mm_dit.framework.pytorch.optim import groups, is_sharded, local, native_optimizer, part_of, whole_of
from mindspeed_mm_dit.optimizers.by_name import RULE
from mindspeed_mm_dit.optimizers.contract import STEP, ConfiguredOptimizer
from mindspeed_mm_dit.terminal import logger

SAME = 1e-3
"""Largest difference between steps of shards and of whole tensors, as a part of the largest change."""
COLUMNS = 4096
"""Columns of the tensors on which that is tried: from so many elements on, 8-bit optimizers use 8 bits."""


class ClassStepper:
    """Steps by an optimizer class; the methods are those of ``stepper.Stepper``."""

    def __init__(self, module: nn.Module, chosen: ConfiguredOptimizer, weight_decay: float) -> None:
        self._trained = {name: p for name, p in module.named_parameters() if p.requires_grad}

        def make(param_groups: list[dict[str, Any]]) -> Optimizer:
            return native_optimizer(RULE, chosen.config, param_groups)

        sharded = [p for p in self._trained.values() if is_sharded(p)]
        is_whole = bool(sharded) and runtime.any_over_ranks(not _steps_shards(make, sharded[0]))
        if is_whole and runtime.rank() == 0:
            logger.info(
                f"note: {chosen.name} does not step shards as it steps whole tensors, so every rank keeps all the "
                "weights that are trained, and the optimizer's state of them"
            )
        param_groups = groups(self._trained.values(), weight_decay)
        self._optimizer = WholeOptimizer(make, param_groups) if is_whole else make(param_groups)
        self.optimizers = [self._optimizer]
        self.switches = hasattr(self._state_owner(next(iter(self._trained.values())))[0], "train")
        self._steps = 0

    def train(self) -> None:
        """Set the weights to those at which gradients are taken; between steps they are those to use."""
        optimizer_state.set_mode(self._optimizer, "train")

    def step(self, lr: float) -> None:
        """Step by the present gradients, and drop them."""
        for group in self._optimizer.param_groups:
            optimizer_state.set_lr(group, lr)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        optimizer_state.set_mode(self._optimizer, "eval")
        self._steps += 1
        if self._steps == 1:
            self.state()  # (raises now, not at the first save, if it cannot be saved)

    def state(self) -> dict[str, dict[str, Any]]:
        """Return what is states of each parameter, by the names of the checkpoint; the tensors are the live ones.

        Of a class that keeps nothing (SGD) it is the number of steps, so that a checkpoint shows that there were some.
        """
        if self._steps and not self._keeps_something():
            return {name: {STEP: torch.tensor(float(self._steps))} for name in self._trained}
        states = {name: optimizer_state.packed(*self._state_owner(p), name) for name, p in self._trained.items()}
        return {name: state for name, state in states.items() if state}

    def _keeps_something(self) -> bool:
        return any(optimizer_state.packed(*self._state_owner(p), name) for name, p in self._trained.items())

    def prepare(self, stored: Mapping[str, tuple[int, ...]]) -> None:
        """Create the state in the ``stored`` shapes, to load into, by a step: load the weights after it.

        ``stored``: shapes of the tensors in the checkpoint, by name.
        """
        optimizer_state.take_a_step(self._optimizer)
        self._steps = 1
        for name, p in self._trained.items() if self._keeps_something() else ():
            start = f"optimizer.state.{name}."
            optimizer = {key[len(start) :]: shape for key, shape in stored.items() if key.startswith(start)}
            optimizer_state.fit(*self._state_owner(p), name, optimizer)

    def restore(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over what no tensor holds from ``states``, a result of :meth:`state` that has been loaded into."""
        keeps_something = self._keeps_something()
        for name, state in states.items():
            if keeps_something:
                optimizer_state.unpack(*self._state_owner(self._trained[name]), state)
            else:
                self._steps = int(state[STEP])

    def _state_owner(self, p: Tensor) -> tuple[Optimizer, Tensor]:
        """Return the optimizer that keeps the state of ``p``, and the tensor of which it keeps it."""
        optimizer = self._optimizer
        return (optimizer.inner, optimizer.whole[p]) if isinstance(optimizer, WholeOptimizer) else (optimizer, p)


class WholeOptimizer(Optimizer):
    """Steps sharded parameters by an optimizer of whole copies of them, on every rank alike.

    Args:
        make: groups -> the optimizer of the copies.
    """

    def __init__(self, make: Callable[[list[dict[str, Any]]], Optimizer], groups: list[dict[str, Any]]) -> None:
        self.whole = {p: nn.Parameter(whole_of(local(p.detach()), p).clone()) for g in groups for p in g["params"]}
        self.inner = make([{**g, "params": [self.whole[p] for p in g["params"]]} for g in groups])
        super().__init__(groups, {"lr": 0.0})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step by the present gradients."""
        for group, inner in zip(self.param_groups, self.inner.param_groups):
            optimizer_state.set_lr(inner, group["lr"])
        for p, whole in self.whole.items():
            whole.grad = None if p.grad is None else whole_of(local(p.grad), p)
        self._with_copies(self.inner.step)
        self.inner.zero_grad(set_to_none=True)

    def train(self) -> None:
        """Switch the weights, if the class does."""
        self._switch("train")

    def eval(self) -> None:
        """Switch the weights, if the class does."""
        self._switch("eval")

    def _switch(self, mode: str) -> None:
        if hasattr(self.inner, mode):
            self._with_copies(lambda: optimizer_state.set_mode(self.inner, mode))

    def _with_copies(self, change: Callable[[], object]) -> None:
        """Copy the weights together, let ``change`` change them, and take this rank's parts."""
        with torch.no_grad():
            for p, whole in self.whole.items():
                whole.copy_(whole_of(local(p), p))
        change()
        with torch.no_grad():
            for p, whole in self.whole.items():
                local(p).copy_(part_of(whole, p))


def _steps_shards(make: Callable[[list[dict[str, Any]]], Optimizer], like: Any) -> bool:
    """Return whether two steps of small tensors, sharded as ``like``, are those of whole tensors.

    Every rank must call this.
    """
    from torch.distributed.tensor import DTensor

    rows = like.device_mesh.shape[-1] + 1  # (so that shards differ in size; their gradients do, too)
    shapes = (rows, COLUMNS), (rows,)

    def shard(x: Tensor) -> Tensor:
        return DTensor.from_local(
            part_of(x, like), like.device_mesh, like.placements, run_check=False, shape=x.shape, stride=x.stride()
        )

    def changed(distribute: Callable[[Tensor], Tensor]) -> list[Tensor]:
        starts = [
            torch.arange(1.0, math.prod(shape) + 1, device=runtime.device()).cos().view(shape) for shape in shapes
        ]
        parameters = [nn.Parameter(distribute(start)) for start in starts]
        optimizer = make([{"params": [p], "weight_decay": 0.0} for p in parameters])
        optimizer_state.set_mode(optimizer, "train")
        for turn in (1, 2):
            for p, start in zip(parameters, starts):
                p.grad = distribute(
                    torch.einsum("r...,r->r...", (7 * turn * start).sin(), torch.arange(1.0, rows + 1).to(start))
                )
            optimizer.step()
        optimizer_state.set_mode(optimizer, "eval")
        for p in parameters:
            optimizer_state.packed(optimizer, p, "a shard")
        return [whole_of(local(p.detach()), p) - start for p, start in zip(parameters, starts)]

    try:
        whole = changed(lambda x: x.clone())
    except Exception:  # (which the first step of the run reports)
        return True
    try:
        sharded = changed(shard)
    except Exception:  # (a class may raise anything)
        return False
    return all((a - b).abs().max() <= SAME * b.abs().max() for a, b in zip(sharded, whole))
