"""Imports that cost seconds: later, where not every run needs them, and with no search for garbage at every turn."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


class _Later(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


def later(name: str) -> Any:
    """Return a stand-in for the module ``name``."""
    return _Later(name)


@contextmanager
def importing() -> Iterator[None]:
    """Import in this block without looking for garbage, and never look at what was imported: a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
