"""What any PyTorch optimizer keeps, as tensors of a checkpoint by the name of their parameter, and back.

The state of a parameter is whatever the optimizer keeps in ``state[p]``, and under ``group`` what it keeps in the
parameter's group besides the arguments of its class (a step counter, Prodigy's ``d``). A number becomes a tensor; a
tensor that is made of others, as torchao's 8-bit ones, becomes these; texts and None are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mindspeed_mm_dit.errors import CheckpointError, ConfigError
from mindspeed_mm_dit.framework.pytorch.optim import is_sharded
from mindspeed_mm_dit.optimizers.by_name import FLAGS, settings_of

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
