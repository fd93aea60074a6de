"""Allocate real memory for modules that load weights, while a host builds its model on the meta device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

_register_parameter = nn.Module.register_parameter  # before a host replaces it while it builds a model


@contextmanager
def real_memory() -> Iterator[None]:
    """Within this context, undo the host's patch of ``register_parameter``."""
    replaced = nn.Module.register_parameter
    nn.Module.register_parameter = _register_parameter
    try:
        yield
    finally:
        nn.Module.register_parameter = replaced
