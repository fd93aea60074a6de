"""What is known by name: the parts of this package, those of its wings, and those that plugins bring.

:func:`join` adds a part. In place of a record it may say where one is, "package.module:NAME": that module is imported
when the part is first asked for. :class:`Joined` holds the parts of a kind.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from mindspeed_mm_dit.errors import ConfigError

Record = TypeVar("Record")
_JOINED: dict[str, dict[str, Any]] = {}
"""Kind -> name -> record, or where it is."""


def join(kind: str, name: str, record: Any) -> None:
    """Add a part: its record, or "package.module:NAME", where that is.

    Raises:
        ConfigError: another part of this kind has the name.
    """
    known = _JOINED.setdefault(kind, {})
    if known.get(name, record) != record:
        raise ConfigError(
            f"{kind} {name}", "is registered already", "choose another name, or uninstall one of the plugins"
        )
    known[name] = record


@lru_cache(maxsize=1)
def load_wings() -> None:
    """Let each wing that is installed join, once per process."""
    for wing in pkgutil.iter_modules([str(Path(__file__).with_name("wings"))], "mindspeed_mm_dit.wings."):
        importlib.import_module(wing.name).join()


class Joined(Mapping[str, Record]):
    """The parts of one kind, by name, in the order in which they joined."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __getitem__(self, name: str) -> Record:
        load_wings()
        record = _JOINED.get(self._kind, {})[name]
        if isinstance(record, str):
            module, _, attribute = record.partition(":")
            record = _JOINED[self._kind][name] = getattr(importlib.import_module(module), attribute)
        return record

    def __iter__(self) -> Iterator[str]:
        load_wings()
        return iter(_JOINED.get(self._kind, {}))

    def __len__(self) -> int:
        return sum(1 for _ in self)
