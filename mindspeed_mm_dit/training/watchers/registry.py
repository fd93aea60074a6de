"""All watchers, in the order in which they are called; other packages add theirs with ``register_watcher``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mindspeed_mm_dit.configs.outputs import check_output_folder
from mindspeed_mm_dit.configs.plugins import load_plugins
from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.errors import check_free
from mindspeed_mm_dit.training.watchers.contract import Run, Watcher, WatcherKind

OUTSIDE: dict[str, WatcherKind] = {}
"""Watchers of other packages; they are called after ours."""


def register_watcher(kind: WatcherKind) -> None:
    """Register a watcher; its file must import no framework before it is opened.

    Raises:
        ConfigError: another watcher has this name.
    """
    check_free(OUTSIDE, kind.name, kind, f"watcher {kind.name}")
    OUTSIDE[kind.name] = kind


def outside() -> list[WatcherKind]:
    """Return the watchers of other packages."""
    load_plugins()
    return list(OUTSIDE.values())


def kinds() -> list[WatcherKind]:
    """Return all watchers, in the order in which they are called."""
    from mindspeed_mm_dit.training.watchers import best, grids, lines, power_ema, profile, validation

    ours = (power_ema.KIND, profile.KIND, lines.KIND, validation.KIND, best.KIND, grids.KIND)
    return [*ours, *outside()]


def open_watchers(run: Run) -> list[Watcher]:
    """Return the watchers that the flags of ``run`` ask for."""
    return [watcher for kind in kinds() if (watcher := kind.open(run)) is not None]


def check_watchers(args: RunConfig, world_size: int) -> None:
    """Raise a UserError for flags that a watcher cannot act on; the result is the same on every rank."""
    for kind in kinds():
        kind.check(args, world_size)


def check_places(args: RunConfig) -> None:
    """Raise ConfigError if a watcher could not write to its folder."""
    for flag, folder in _places(args):
        check_output_folder(flag, folder, make=False)


def _places(args: RunConfig) -> Iterator[tuple[str, Path]]:
    for kind in kinds():
        if (place := kind.writes(args)) is not None:
            yield place
