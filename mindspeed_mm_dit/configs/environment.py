"""Reads numbers from environment variables."""

from __future__ import annotations

import re
from collections.abc import Mapping

from mindspeed_mm_dit.errors import ConfigError


def integer_variable(
    environment: Mapping[str, str], name: str, default: int, lowest: int, highest: int | None = None, why: str = ""
) -> int:
    """Return the variable ``name`` as a number; ``default`` if it is unset or empty.

    Raises:
        ConfigError: it is not a whole number from ``lowest`` to ``highest``; ``why`` explains the bound in the message.
    """
    text = environment.get(name, "")
    if not text:
        return default
    if re.fullmatch("[0-9]{1,9}", text) and lowest <= int(text) <= (int(text) if highest is None else highest):
        return int(text)
    allowed = f"of at least {lowest}" if highest is None else f"from {lowest} to {highest}"
    raise ConfigError(f"{name} = {text}", f"must be a whole number {allowed}{why}")
