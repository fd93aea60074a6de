"""Optimizers without PyTorch's compiler, whose import takes longer than that of all the rest of PyTorch.

``torch.optim`` tells the compiler at every step to skip it, and imports it for that. This project compiles no step, so
there is nothing to skip. A PyTorch that marks its optimizers otherwise imports its compiler as before.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.optim import Optimizer

_UNCOMPILED = "__dynamo_disable"
"""Attribute in which PyTorch stores the variant of a method that its compiler skips."""


def avoid_compiler_import() -> None:
    """Let optimizers be created, saved and loaded without importing ``torch._dynamo``."""
    for name in ("add_param_group", "state_dict", "load_state_dict", "zero_grad"):
        method = getattr(getattr(Optimizer, name), "__wrapped__", None)
        if method is not None and not hasattr(method, _UNCOMPILED):
            setattr(method, _UNCOMPILED, method)


def uncompiled(kind: type[Optimizer]) -> type[Optimizer]:
    """Return the optimizer ``kind`` with a step of the same results that does not import ``torch._dynamo``."""
    plain = inspect.unwrap(kind.step)

    def step(self: Optimizer, closure: Any = None) -> Any:
        with torch.no_grad():
            return plain(self, closure)

    return type(kind.__name__, (kind,), {"step": step})
