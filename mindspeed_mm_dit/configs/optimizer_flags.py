"""Adds the settings of every optimizer as flags, including optimizers of plugins."""

from __future__ import annotations

import argparse
from typing import Any, get_type_hints

from mindspeed_mm_dit.errors import ConfigError, flag_of
from mindspeed_mm_dit.optimizers.registry import OPTIMIZERS, settings


def optimizer_settings(group: Any) -> None:
    """Add a flag for each optimizer setting to ``group``; optimizers with the same setting share the flag.

    Raises ConfigError if a plugin's setting has the name of an existing flag.
    """
    for name, (field, owners) in settings().items():
        text = f"{', '.join(owners)}: {field.metadata['help']}".replace("%", "%%")
        kind = get_type_hints(OPTIMIZERS[owners[0]].config)[name]
        options: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if kind is bool else {"type": kind}
        options |= field.metadata["how"]
        try:
            action = group.add_argument(flag_of(name), default=field.default, **options)
        except argparse.ArgumentError:
            what = f"setting {name!r} of the optimizer {owners[0]!r}"
            raise ConfigError(what, "is a flag of this command already", "give it another name") from None
        action.help = text  # (in add_argument, Python 3.10 would append a default to BooleanOptionalAction)
