"""The interface of a metrics logger, which records the curves and pictures of a run.

A metrics logger is one file: a config, whose fields are its flags, a class with the methods of :class:`MetricsLogger`,
and a ``MetricsLoggerKind``. ``registry.metrics_loggers`` lists ours; a plugin of another package calls
``registry.register_metrics_logger``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np


class MetricsLogger(Protocol):
    """Records the scalars and pictures of a run, on the rank that logs."""

    def add(self, iteration: int, values: Mapping[str, float]) -> None:
        """Record values by name; iterations never decrease."""

    def add_picture(self, iteration: int, name: str, pixels: np.ndarray) -> None:
        """Record a picture (H, W, 3) uint8."""

    def close(self) -> None:
        """Finish writing everything to disk."""


class Board:
    """A metrics logger that writes to the ``run`` of a ``package`` with a picture type ``Image``."""

    def __init__(self, package: Any, run: Any) -> None:
        self._package, self._run = package, run

    def add(self, iteration: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=iteration)

    def add_picture(self, iteration: int, name: str, pixels: np.ndarray) -> None:
        self._run.log({name: self._package.Image(pixels)}, step=iteration)

    def close(self) -> None:
        self._run.finish()


@dataclass(frozen=True)
class Opening:
    """The facts of the run that a metrics logger is opened for."""

    iteration: int
    """Steps taken before it is opened."""
    folder: str
    """Where the metrics logger writes; empty if it writes no files."""
    settings: Mapping[str, Any]
    """Flags of the run whose values are numbers, texts, true or false."""


@dataclass(frozen=True)
class MetricsLoggerKind:
    """A metrics logger as the registry knows it."""

    name: str
    """Prefix of its flags: --NAME-FIELD."""
    config: type
    """Frozen dataclass; each field, made with :func:`flag`, is a flag, and the first enables the logger."""
    open: Callable[[Any, Opening], MetricsLogger]
    """(config, Opening) -> metrics logger. Its first error, now or later, is reported and ends its curves."""
    location: Callable[[Any, Path | None], Path | None] | None = None
    """(config, parent folder of --save, or None) -> its output folder, or None if there is none. The last flag of the
    config names that folder. A metrics logger without ``location`` writes no files."""
    packages: tuple[str, ...] = ()
    """Packages that it imports."""
    install: str = ""
    """What pip installs for it."""
    in_megatron: bool = False
    """Whether Megatron has the same flags, with the same effect."""


def in_save_folder(name: str = "") -> Callable[[Any, Path | None], Path | None]:
    """Return a ``location``: the config's ``save_dir`` or, without it, ``name`` in the parent folder of --save."""
    return lambda config, save_parent: Path(config.save_dir) if config.save_dir else save_parent and save_parent / name


def flag(metavar: str, words: str) -> Any:
    """Return a field of a metrics logger's config: a flag with the help text ``words``, None if it is not given."""
    return field(default=None, metadata={"metavar": metavar, "help": words})
