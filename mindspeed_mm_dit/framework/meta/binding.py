"""Imports the file of a network a second time, for the meta backend.

A network's file takes ``nn`` and ``ops`` from ``framework`` when it is imported, and keeps those of the active
framework. Here it is executed again, in a separate module in which ``framework`` is the meta backend. Files that also
take ``nn`` or ``ops``, directly or through others, are executed again as well. All else is imported as usual.
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
    """Return ``reference``, "package.module:name", on the meta backend; raises ConfigError if the import fails."""
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


def _import(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
    """Import for a module on the meta backend, as ``import`` does."""
    whole = importlib.util.resolve_name("." * level + name, globals["__package__"]) if level else name
    if whole == _FRAMEWORK and fromlist:
        for part in fromlist:
            importlib.import_module(f"{meta.__name__}.{part}")
        return meta
    if fromlist and _is_bound(whole):
        return _executed(whole)
    imported = builtins.__import__(name, globals, locals, fromlist, level)
    if fromlist and hasattr(imported, "__path__"):  # from a package: modules of it may be bound
        parts = {part: f"{whole}.{part}" for part in fromlist if isinstance(getattr(imported, part, None), ModuleType)}
        bound = {part: _executed(module) for part, module in parts.items() if _is_bound(module)}
        return SimpleNamespace(**{part: getattr(imported, part) for part in fromlist} | bound) if bound else imported
    return imported


@functools.cache
def _is_bound(name: str) -> bool:
    """Return whether a module takes ``nn`` or ``ops`` of the framework, directly or through another."""
    visited, pending = {name}, [name]
    while pending:
        new = _imported_by(pending.pop()) - visited
        if _FRAMEWORK in new:
            return True
        visited |= new
        pending += new
    return False


@functools.cache
def _imported_by(name: str) -> frozenset[str]:
    """Return the modules of its package and of this project that a module imports at its top level."""
    spec = importlib.util.find_spec(name)
    get_source = getattr(spec and spec.loader, "get_source", None)
    if spec is None or spec.submodule_search_locations or get_source is None:
        return frozenset()
    modules = (importlib.util.resolve_name(a or b, spec.parent) for a, b in _IMPORT.findall(get_source(name) or ""))
    packages = (name.partition(".")[0], "mindspeed_mm_dit")
    return frozenset(module for module in modules if module.partition(".")[0] in packages)
