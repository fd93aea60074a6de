"""Any PyTorch optimizer that a run names by its class: its steps, and its state as tensors of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mindspeed_mm_dit.errors import CheckpointError, ConfigError
from mindspeed_mm_dit.framework.pytorch import runtime
from mindspeed_mm_dit.framework.pytorch.optim import groups, is_sharded, local, native_optimizer, part_of, whole_of
from mindspeed_mm_dit.optimizers.contract import STEP, ConfiguredOptimizer
from mindspeed_mm_dit.optimizers.registry import FLAGS, RULE, settings_of
from mindspeed_mm_dit.terminal import logger

GROUP = "group"
Packed = dict[str, Any]
"""Tensors by name, nested."""


def take_a_step(optimizer: Optimizer) -> None:
    """Let an optimizer create its state by a step whose gradients are ones; it changes the weights."""
    set_mode(optimizer, "train")
    for group in optimizer.param_groups:
        set_lr(group, 1.0)  # (of 0, Prodigy does not begin; the run sets it in every step)
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    set_mode(optimizer, "eval")


def set_lr(group: dict[str, Any], lr: float) -> None:
    """Set the learning rate of a group; torchao keeps it in a tensor."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr


def set_mode(optimizer: Optimizer, mode: str) -> None:
    """Call ``train()`` or ``eval()`` of an optimizer that has it: the weights become those to train, or to use."""
    getattr(optimizer, mode, lambda: None)()


def packed(optimizer: Optimizer, p: Tensor, name: str) -> Packed:
    """Return the state of the parameter ``p`` with this name; empty if there is none. The tensors are the live ones.

    Raises:
        ConfigError: it holds something that a checkpoint cannot.
    """
    if p not in optimizer.state or not optimizer.state[p]:
        return {}
    _check_shards(optimizer, p, name)
    state = _pack(optimizer.state[p], f"{type(optimizer).__name__}, state of {name}")
    group = _pack(_kept_in_group(optimizer, p), f"{type(optimizer).__name__}, group of {name}")
    return {**state, **({GROUP: group} if group else {})}


def unpack(optimizer: Optimizer, p: Tensor, read: Mapping[str, Any]) -> None:
    """Set the numbers in the state of ``p`` to those of ``read``, a filled result of :func:`packed`."""
    group = next(group for group in optimizer.param_groups if any(each is p for each in group["params"]))
    group.update(_unpack(_kept_in_group(optimizer, p), read.get(GROUP, {})))
    optimizer.state[p].update(_unpack(dict(optimizer.state[p]), read))


def fit(optimizer: Optimizer, p: Tensor, name: str, stored: Mapping[str, tuple[int, ...]]) -> None:
    """Give the state of ``p`` the shapes in ``stored``, a checkpoint's shapes by name within the state of ``name``.

    Raises:
        CheckpointError: the optimizer keeps something else than is stored.
    """
    if not stored:  # (the parameter never had a gradient)
        optimizer.state.pop(p, None)
        return
    for key, value in optimizer.state[p].items():
        if isinstance(value, Tensor) and tuple(value.shape) != stored.get(key, tuple(value.shape)):
            optimizer.state[p][key] = _empty(p, stored[key], value.dtype)
    if differing := sorted(set(_names(packed(optimizer, p, name))) ^ set(stored)):
        raise CheckpointError(
            f"The checkpoint of --load and {type(optimizer).__name__} as it is installed here do not keep the same of "
            f"{name}: only one has {', '.join(differing)}. Install the version of that run, or pass --no-load-optim."
        )


def _kept_in_group(optimizer: Optimizer, p: Tensor) -> dict[str, Any]:
    settings = {"initial_lr", *FLAGS, *settings_of(type(optimizer))}
    group = next(group for group in optimizer.param_groups if any(each is p for each in group["params"]))
    return {key: value for key, value in group.items() if key not in settings}


def _pack(value: Any, what: str) -> Any:
    if isinstance(value, Tensor):
        if hasattr(value, "__tensor_flatten__") and not is_sharded(value):
            return {name: _pack(getattr(value, name), what) for name in value.__tensor_flatten__()[0]}
        return value.detach()
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        parts = {str(key): _pack(part, f"{what}: {key}") for key, part in value.items() if not _is_left_out(part)}
        return {key: part for key, part in parts.items() if not (isinstance(part, dict) and not part)}
    if isinstance(value, int | float):
        kind = torch.bool if isinstance(value, bool) else torch.int64 if isinstance(value, int) else torch.float64
        return torch.tensor(value, dtype=kind)
    raise ConfigError(
        f"--optimizer keeps a {type(value).__name__}, which a checkpoint cannot hold ({what}). Use another optimizer."
    )


def _is_left_out(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _unpack(value: Any, read: Any) -> Any:
    """Return ``value`` with the numbers that are in ``read``; its tensors have been filled in place."""
    if isinstance(value, dict):
        return {key: _unpack(part, read.get(str(key))) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_unpack(part, read.get(str(key))) for key, part in enumerate(value))
    if isinstance(value, int | float) and isinstance(read, Tensor):
        return type(value)(read.item())
    return value


def _names(tensors: Packed, prefix: str = "") -> Iterator[str]:
    for key, value in tensors.items():
        if isinstance(value, dict):
            yield from _names(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _empty(p: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor to fill, sharded as ``p`` if it has its elements."""
    if shape == tuple(p.shape):
        return torch.zeros_like(p.detach(), dtype=dtype)
    if shape == (p.numel(),):
        return torch.zeros_like(p.detach().flatten(), dtype=dtype)
    return torch.zeros(shape, dtype=dtype, device=p.device)


def _check_shards(optimizer: Optimizer, p: Any, name: str) -> None:
    """Raise ConfigError if the state of a sharded parameter is of this rank alone, which no other could resume."""
    if not is_sharded(p):
        return
    part = tuple(p.to_local().shape)
    for key, value in optimizer.state[p].items():
        if not isinstance(value, Tensor):
            continue
        if is_sharded(value):
            local = value.to_local()  # type: ignore[operator]
            is_own = hasattr(local, "__tensor_flatten__") or any(x.is_partial() for x in value.placements)  # type: ignore[attr-defined]
        else:
            is_own = part != tuple(p.shape) and value.numel() > 1 and value.numel() == p.to_local().numel()
        if is_own:
            raise ConfigError(
                f"--optimizer = {type(optimizer).__name__} keeps {key} of {name} in a form of each rank's own, which "
                "cannot be resumed on other ranks. Use it without --use-torch-fsdp2, or another optimizer."
            )


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
        set_mode(self._optimizer, "train")

    def step(self, lr: float) -> None:
        """Step by the present gradients, and drop them."""
        for group in self._optimizer.param_groups:
            set_lr(group, lr)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        set_mode(self._optimizer, "eval")
        self._steps += 1
        if self._steps == 1:
            self.state()  # (raises now, not at the first save, if it cannot be saved)

    def state(self) -> dict[str, dict[str, Any]]:
        """Return what is states of each parameter, by the names of the checkpoint; the tensors are the live ones.

        Of a class that keeps nothing (SGD) it is the number of steps, so that a checkpoint shows that there were some.
        """
        if self._steps and not self._keeps_something():
            return {name: {STEP: torch.tensor(float(self._steps))} for name in self._trained}
        states = {name: packed(*self._state_owner(p), name) for name, p in self._trained.items()}
        return {name: state for name, state in states.items() if state}

    def _keeps_something(self) -> bool:
        return any(packed(*self._state_owner(p), name) for name, p in self._trained.items())

    def prepare(self, stored: Mapping[str, tuple[int, ...]]) -> None:
        """Create the state in the ``stored`` shapes, to load into, by a step: load the weights after it.

        ``stored``: shapes of the tensors in the checkpoint, by name.
        """
        take_a_step(self._optimizer)
        self._steps = 1
        for name, p in self._trained.items() if self._keeps_something() else ():
            start = f"optimizer.state.{name}."
            optimizer = {key[len(start) :]: shape for key, shape in stored.items() if key.startswith(start)}
            fit(*self._state_owner(p), name, optimizer)

    def restore(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over what no tensor holds from ``states``, a result of :meth:`state` that has been loaded into."""
        keeps_something = self._keeps_something()
        for name, state in states.items():
            if keeps_something:
                unpack(*self._state_owner(self._trained[name]), state)
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
            set_lr(inner, group["lr"])
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
            self._with_copies(lambda: set_mode(self.inner, mode))

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
        set_mode(optimizer, "train")
        for turn in (1, 2):
            for p, start in zip(parameters, starts):
                p.grad = distribute(
                    torch.einsum("r...,r->r...", (7 * turn * start).sin(), torch.arange(1.0, rows + 1).to(start))
                )
            optimizer.step()
        set_mode(optimizer, "eval")
        for p in parameters:
            packed(optimizer, p, "a shard")
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
