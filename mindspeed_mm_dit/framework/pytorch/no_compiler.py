"""Optimizers without PyTorch's compiler, whose import takes longer than that of all the rest of PyTorch.

``torch.optim`` asks its compiler, at every step, not to look at it. No step is compiled in this project, so there is
nobody to be asked. A PyTorch that marks its optimizers otherwise imports its compiler as before.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.optim import Optimizer

_ANSWER = "__dynamo_disable"
"""Where PyTorch keeps what its compiler has made of a method that is never compiled."""


def spare_the_compiler() -> None:
    """Let optimizers be made, saved and loaded without an import of ``torch._dynamo``."""
    for name in ("add_param_group", "state_dict", "load_state_dict", "zero_grad"):
        method = getattr(getattr(Optimizer, name), "__wrapped__", None)
        if method is not None and not hasattr(method, _ANSWER):
            setattr(method, _ANSWER, method)


def uncompiled(kind: type[Optimizer]) -> type[Optimizer]:
    """Return the optimizer ``kind`` with a step, of the same numbers, that does not import ``torch._dynamo``."""
    plain = inspect.unwrap(kind.step)

    def step(self: Optimizer, closure: Any = None) -> Any:
        with torch.no_grad():
            return plain(self, closure)

    return type(kind.__name__, (kind,), {"step": step})
