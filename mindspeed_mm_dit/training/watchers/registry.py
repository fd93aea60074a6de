"""All watchers, in the order in which they are called; other packages add theirs with ``register_watcher``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mindspeed_mm_dit.configs.outputs import check_output_folder
from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.registry import Joined
from mindspeed_mm_dit.training.watchers.contract import Run, Watcher, WatcherKind

WATCHERS = Joined[WatcherKind]("watcher")
"""All watchers, in the order in which they are called: those of plugins last."""


def register_watcher(kind: WatcherKind) -> None:
    """Register a watcher; its file must import no framework before it is opened.

    Raises:
        ConfigError: another watcher has this name.
    """
    WATCHERS[kind.name] = kind


def open_watchers(run: Run) -> list[Watcher]:
    """Return the watchers that the flags of ``run`` ask for."""
    return [watcher for kind in WATCHERS.values() if (watcher := kind.open(run)) is not None]


def check_watchers(args: RunConfig, world_size: int) -> None:
    """Raise a UserError for flags that a watcher cannot act on; the result is the same on every rank."""
    for kind in WATCHERS.values():
        kind.check(args, world_size)


def check_places(args: RunConfig) -> None:
    """Raise ConfigError if a watcher could not write to its folder."""
    for flag, folder in _places(args):
        check_output_folder(flag, folder, make=False)


def _places(args: RunConfig) -> Iterator[tuple[str, Path]]:
    for kind in WATCHERS.values():
        if (place := kind.writes(args)) is not None:
            yield place
