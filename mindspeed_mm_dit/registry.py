"""Registries: entries by kind and name, from this package (``parts.py``), its tools and integrations, and plugins.

:func:`register` adds an entry of a kind: its record, or its location "package.module:NAME", which is imported when the
entry is first used. :class:`Registry` holds the entries of one kind.

Another package declares a function without arguments under the entry point group ``mindspeed_mm_dit.plugins``::

    [project.entry-points."mindspeed_mm_dit.plugins"]
    my_parts = "my_package:join"

The function calls :func:`register`. Training, mm-dit and the processes that they start then all have its entries.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping, MutableMapping
from functools import lru_cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

from mindspeed_mm_dit import parts
from mindspeed_mm_dit.errors import ConfigError, PlatformError, UserError, nearest

GROUP = "mindspeed_mm_dit.plugins"
Record = TypeVar("Record")
_RECORDS: dict[str, dict[str, Any]] = {kind: dict(entries) for kind, entries in parts.ENTRIES.items()}
"""Kind -> name -> record, or its location."""


def register(kind: str, name: str, record: Any) -> None:
    """Add an entry: its record, or its location "package.module:NAME".

    Raises:
        ConfigError: there is no such kind, or another entry of it has the name.
    """
    if kind not in _RECORDS:
        raise ConfigError(
            f"register({kind!r}, {name!r}, ...) names an unknown kind of registry entry. {nearest(kind, _RECORDS)}The "
            f"kinds are {', '.join(_RECORDS)}."
        )
    if _load_record(kind, name, record) != record:
        raise ConfigError(
            f"The {kind} {name!r} is registered already. Choose another name, or uninstall one of the plugins."
        )
    _RECORDS[kind][name] = record


def import_object(location: str, what: str) -> Any:
    """Import and return the object at ``location``, "package.module:NAME"; ``what`` describes it in errors.

    Raises:
        PlatformError: a third-party module cannot be imported.
    """
    module, _, name = location.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # (third-party code may raise anything)
        if isinstance(error, UserError) or module.partition(".")[0] == __package__:
            raise
        raise _load_error(f"{what} ({location})", error) from error


def _load_error(what: str, error: Exception) -> PlatformError:
    return PlatformError(f"{what} cannot be loaded: {type(error).__name__}: {error}. Fix it, or uninstall its package.")


def _load_record(kind: str, name: str, other: Any = None) -> Any:
    """Return the record of ``name``, imported unless ``other``, with which it is compared, is a location."""
    record = _RECORDS[kind].get(name, other)
    if isinstance(record, str) and not isinstance(other, str):
        record = _RECORDS[kind][name] = import_object(record, f"{kind} {name!r}")
    return record


@lru_cache(maxsize=1)
def load_components() -> None:
    """Let each package in ``tools/`` and ``integrations/`` register its entries, once per process."""
    for folder in ("tools", "integrations"):
        path = [str(Path(__file__).with_name(folder))]
        for component in pkgutil.iter_modules(path, f"{__package__}.{folder}."):
            importlib.import_module(component.name).register()


@lru_cache(maxsize=1)
def load_plugins() -> tuple[str, ...]:
    """Let every component and every installed plugin register, once per process, and return the plugins' names.

    Raises:
        ConfigError: two plugins register the same name.
        PlatformError: a plugin cannot be imported, or fails.
    """
    load_components()
    points = sorted(entry_points(group=GROUP))
    for point in points:
        try:
            point.load()()
        except UserError:
            raise
        except Exception as error:  # (a plugin may raise anything)
            raise _load_error(f"plugin {point.name} ({point.value})", error) from error
    return tuple(point.name for point in points)


class Registry(MutableMapping[str, Record]):
    """The entries of one kind by name: built-in ones, tools and integrations, then plugins; loaded when needed."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __getitem__(self, name: str) -> Record:
        if name not in self:
            raise KeyError(name)
        record: Record = _load_record(self._kind, name)
        return record

    def __contains__(self, name: object) -> bool:
        known = _RECORDS[self._kind]
        for load in (load_components, load_plugins):
            if name in known:
                break
            load()
        return name in known

    def __setitem__(self, name: str, record: Record) -> None:
        register(self._kind, name, record)

    def __delitem__(self, name: str) -> None:
        del _RECORDS[self._kind][name]

    def __iter__(self) -> Iterator[str]:
        load_plugins()
        return iter(_RECORDS[self._kind])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def external(self) -> list[Record]:
        """Return the entries of tools, integrations and plugins."""
        return [self[name] for name in self if name not in parts.ENTRIES[self._kind]]


class Configs(Mapping[str, Any]):
    """The config classes of the entries of one kind, by name: field ``config`` of their records."""

    def __init__(self, kind: str) -> None:
        self._parts = Registry[Any](kind)

    def __getitem__(self, name: str) -> Any:
        return self._parts[name].config

    def __contains__(self, name: object) -> bool:
        return name in self._parts

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)
