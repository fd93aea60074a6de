"""Tensors in what modules take and give: lists, tuples and mappings of them, nested at will."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any


def leaves(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf with its place: the keys and numbers that lead to it, joined by dots."""
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
        found = copy.copy(value)
        for key, inside in value.items():
            found[key] = mapped(inside, change)  # type: ignore[index]
        return found
    if isinstance(value, (list, tuple)):
        changed = [mapped(inside, change) for inside in value]
        return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)
    return change(value)
