"""Modules that are imported when something of them is first asked for: what costs seconds, and not every run needs."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any


class _Later(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


def later(name: str) -> Any:
    """Return a stand-in for the module ``name``."""
    return _Later(name)
