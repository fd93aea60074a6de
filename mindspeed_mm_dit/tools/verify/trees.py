"""Nested inputs and outputs of modules: lists, tuples and mappings of tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any


def leaves(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf with its path: the keys and indices that lead to it, joined by dots."""
    if isinstance(value, Mapping):
        items: Any = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    else:
        yield at, value
        return
    for key, inside in items:
        yield from leaves(inside, f"{at}.{key}" if at else str(key))


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return the same structure with every leaf changed."""
    if isinstance(value, Mapping):
        mapping = copy.copy(value)
        for key, inside in value.items():
            mapping[key] = mapped(inside, change)  # type: ignore[index]
        return mapping
    if isinstance(value, (list, tuple)):
        changed = [mapped(inside, change) for inside in value]
        return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)
    return change(value)
