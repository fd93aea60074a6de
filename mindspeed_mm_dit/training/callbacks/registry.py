"""All callbacks, in the order in which they are called; other packages register theirs with ``register_callback``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mindspeed_mm_dit.configs.outputs import check_output_folder
from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.registry import Registry
from mindspeed_mm_dit.training.callbacks.contract import Callback, CallbackKind, Run

CALLBACKS = Registry[CallbackKind]("callback")
"""All callbacks, in the order in which they are called: those of plugins last."""


def register_callback(kind: CallbackKind) -> None:
    """Register a callback; its file must import no framework before it is opened.

    Raises:
        ConfigError: another callback has this name.
    """
    CALLBACKS[kind.name] = kind


def open_callbacks(run: Run) -> list[Callback]:
    """Return the callbacks that the flags of ``run`` enable."""
    return [callback for kind in CALLBACKS.values() if (callback := kind.open(run)) is not None]


def check_callbacks(args: RunConfig, world_size: int) -> None:
    """Raise a UserError for flags that a callback cannot act on; the result is the same on every rank."""
    for kind in CALLBACKS.values():
        kind.check(args, world_size)


def check_callback_folders(args: RunConfig) -> None:
    """Raise ConfigError if a callback could not write to its folder."""
    for flag, folder in _output_folders(args):
        check_output_folder(flag, folder, make=False)


def _output_folders(args: RunConfig) -> Iterator[tuple[str, Path]]:
    for kind in CALLBACKS.values():
        if (output := kind.writes(args)) is not None:
            yield output
