"""What keeps the curves and pictures of a run, and how it is made known.

A tracker is one file: a config, whose fields are its flags, a class with the names of :class:`Tracker`, and a record,
``TrackerKind``. Ours stand in ``registry.trackers``; a plugin of another package calls ``registry.register_tracker``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np


class Tracker(Protocol):
    """Keeps what a run says in numbers and pictures; it lives on the rank that logs."""

    def add(self, iteration: int, values: Mapping[str, float]) -> None:
        """Keep values by name; iterations never go down."""

    def add_picture(self, iteration: int, name: str, pixels: np.ndarray) -> None:
        """Keep a picture (H, W, 3) uint8."""

    def close(self) -> None:
        """Have all of it on disk."""


class Board:
    """A tracker that is a run of a ``package`` with pictures of its own, ``Image``."""

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
    """What a tracker is told of the run that it is opened for."""

    iteration: int
    """Steps before it."""
    folder: str
    """Where the tracker writes; empty for one that has no place."""
    settings: Mapping[str, Any]
    """Flags of the run whose values are numbers, texts, true or false."""


@dataclass(frozen=True)
class TrackerKind:
    """A tracker as the registry knows it."""

    name: str
    """What its flags begin with: --NAME-FIELD."""
    config: type
    """Frozen dataclass; each field, made with :func:`flag`, is a flag, and the first asks for the tracker."""
    open: Callable[[Any, Opening], Tracker]
    """(config, Opening) -> tracker. Whatever it raises, then or later, is said once and is the end of its curves."""
    place: Callable[[Any, Path | None], Path | None] | None = None
    """(config, folder that --save lies in, or None) -> where it writes; None: there is nowhere. The flag that names the
    place is the last of the config's. A tracker without ``place`` writes no files."""
    packages: tuple[str, ...] = ()
    """What has to be importable for it."""
    install: str = ""
    """What pip installs for it."""
    in_megatron: bool = False
    """Whether its flags, and what they do, are Megatron's as well."""


def flag(metavar: str, words: str) -> Any:
    """Return a field of a tracker's config: a flag that --help explains by ``words``; None where it is not given."""
    return field(default=None, metadata={"metavar": metavar, "help": words})
