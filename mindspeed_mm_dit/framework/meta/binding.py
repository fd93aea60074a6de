"""Imports the file of a network a second time, for the meta backend.

A network's file takes ``nn`` and ``ops`` from ``framework`` when it is imported, and keeps those of the active
framework. Here it is executed again, in a module of its own: what it imports of our framework is paper, and files that
take ``nn`` or ``ops`` too, directly or through others, are executed again as well. All else is imported as usual.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import importlib.util
import re
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.framework import meta

_FRAMEWORK = "mindspeed_mm_dit.framework"
_IMPORT = re.compile(r"^(?:from\s+([.\w]+)\s+import\b|import\s+([.\w]+))", re.M)
"""An import at the top level of a file."""
_lock = threading.RLock()


def meta_reference(reference: str) -> Any:
    """Return what ``reference``, "package.module:name", is on the meta backend; raises ConfigError if it cannot be imported."""
    module, _, name = reference.partition(":")
    try:
        with _lock:
            return getattr(_executed(module), name)
    except (ImportError, AttributeError) as error:
        cure = 'write "package.module:Class", and use the layers and operators of mindspeed_mm_dit.framework alone'
        raise ConfigError(
            f"network = {reference!r}", f"cannot be imported for the meta backend: {error}", cure
        ) from error


@functools.cache
def _executed(name: str) -> ModuleType:
    """Return the module ``name``, executed for the meta backend."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        raise ImportError(f"there is no module {name!r}")
    module = ModuleType(f"{name} on the meta backend")
    module.__package__, module.__file__ = spec.parent, spec.origin
    module.__dict__["__builtins__"] = {**vars(builtins), "__import__": _import}
    sys.modules[module.__name__] = module  # (dataclasses look there)
    exec(spec.loader.get_code(name), vars(module))  # type: ignore[attr-defined]
    return module


def _import(name: str, globals: Any = None, locals: Any = None, wanted: Any = (), level: int = 0) -> Any:
    """Import for a module on the meta backend, as ``import`` does."""
    whole = importlib.util.resolve_name("." * level + name, globals["__package__"]) if level else name
    if whole == _FRAMEWORK and wanted:
        for part in wanted:
            importlib.import_module(f"{meta.__name__}.{part}")
        return meta
    if wanted and _is_bound(whole):
        return _executed(whole)
    usual = builtins.__import__(name, globals, locals, wanted, level)
    if wanted and hasattr(usual, "__path__"):  # from a package: modules of it may be bound
        parts = {part: f"{whole}.{part}" for part in wanted if isinstance(getattr(usual, part, None), ModuleType)}
        bound = {part: _executed(module) for part, module in parts.items() if _is_bound(module)}
        return SimpleNamespace(**{part: getattr(usual, part) for part in wanted} | bound) if bound else usual
    return usual


@functools.cache
def _is_bound(name: str) -> bool:
    """Return whether a module takes ``nn`` or ``ops`` of the framework, directly or through another."""
    seen, ahead = {name}, [name]
    while ahead:
        new = _imported_by(ahead.pop()) - seen
        if _FRAMEWORK in new:
            return True
        seen |= new
        ahead += new
    return False


@functools.cache
def _imported_by(name: str) -> frozenset[str]:
    """Return the modules of its own package and of ours that a module imports at its top level."""
    spec = importlib.util.find_spec(name)
    get_source = getattr(spec and spec.loader, "get_source", None)
    if spec is None or spec.submodule_search_locations or get_source is None:
        return frozenset()
    found = (importlib.util.resolve_name(a or b, spec.parent) for a, b in _IMPORT.findall(get_source(name) or ""))
    return frozenset(each for each in found if each.partition(".")[0] in (name.partition(".")[0], "mindspeed_mm_dit"))
