"""Checks for flags without effect: empty ones, ones that need another flag, and ones this device ignores."""

from __future__ import annotations

import os
from collections.abc import Sequence

from mindspeed_mm_dit.configs.run import RunConfig, rows
from mindspeed_mm_dit.errors import ConfigError, flag_of


def check_flag_dependencies(args: RunConfig) -> None:
    """Raise ConfigError for an empty flag, or one without a flag that it needs."""
    flags = args.flags()
    for name, value in flags.items():
        if isinstance(value, str) and not value.strip():
            raise ConfigError(f"{flag_of(name)} = {value!r}", "is empty", "write a value, or drop the flag")
    for row in rows():
        missing = [flag_of(other) for other in row.needs if flags.get(row.name) and not flags.get(other)]
        if missing:
            raise alone(row.word, missing)


def alone(flag: str, missing: Sequence[str]) -> ConfigError:
    """Return the error for a flag that has no effect without the ``missing`` ones."""
    return ConfigError(flag, f"has no effect without {' and '.join(missing)}", "add it, or drop this one")


def check_tool(what: str, path: str | None) -> None:
    """Raise ConfigError if the tools.json ``path`` does not exist; ``what`` is the setting that named it."""
    if path and not os.path.isfile(path):
        raise ConfigError(f"{what} = {path}", "there is no such file", "name MindSpeed-MM's tools.json, or drop it")


def without_effect(args: RunConfig, framework: str, device: str) -> list[str]:
    """Return a note for each flag that has no effect with this framework on this kind of device."""
    notes = []
    if args.tf32 and framework == "pytorch" and device != "cuda":
        notes.append(f"note: --tf32 has no effect: it is for NVIDIA GPUs, and this device is a {device.upper()}")
    if args.pynative and framework == "pytorch":
        notes.append("note: --pynative has no effect: it is for MindSpore, and the framework is PyTorch")
    return notes
