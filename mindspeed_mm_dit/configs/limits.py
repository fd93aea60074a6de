"""Bounds that hold whatever the machine: largest numbers, longest paths, and values cut short to be shown."""

from __future__ import annotations

import os
import reprlib
from typing import Any

from mindspeed_mm_dit.errors import ConfigError

LARGEST = 2**63 - 1
"""Largest whole number that tensors, positions and NumPy's generators hold."""
MOST_SAMPLES = 2**62
"""Samples that a run can consume; the positions from there on are validation's."""
MOST_THREADS = 1024
"""Threads that prepare batches."""
MOST_FRAMES = 100_000
"""Frames of a clip: an hour at 24 a second, and more than any model takes."""
MOST_PIXELS = 32_768
"""Height or width of a clip, in pixels."""
MOST_GUIDANCE = 1000.0
"""Scale of classifier-free guidance; samples are of no use from about 20 on, and no numbers far beyond this."""
MOST_STEPS = 1_000_000
"""Steps of a chain from noise to samples; their times are made at once, before the first."""
FLOAT32 = (1e-38, 3e38)
"""Smallest and largest magnitude that float32 holds with all its digits."""
_NAME_BYTES, _PATH_BYTES = 255, 4096
"""Longest file name and path that Linux has."""


class _Shown(reprlib.Repr):
    """``repr`` of a fixed length, whatever the value."""

    def repr_int(self, x: int, level: int) -> str:
        """Return a whole number, or for one of very many digits about how many they are."""
        return repr(x) if x.bit_length() < 256 else f"about {'-' if x < 0 else ''}10**{int(x.bit_length() * 0.30103)}"


_shown = _Shown()
_shown.maxstring = _shown.maxother = 120


def shown(value: Any) -> str:
    """Return ``value`` as an error message shows it: its ``repr``, cut where it is long or nested deeply."""
    return _shown.repr(value)


def check_between(what: str, value: float, low: float, high: float, cure: str = "") -> None:
    """Raise ConfigError unless ``low`` <= ``value`` <= ``high``; ``what`` names the setting, as in "ae.channels"."""
    if not low <= value <= high:
        reason = f"must be at least {low:,}" if value < low else f"must be a number of at most {high:,}"
        raise ConfigError(f"{what} = {shown(value)}", reason, cure)


def check_path(what: str, path: str) -> None:
    """Raise ConfigError for a path that no file or folder can have; ``what`` names the setting."""
    reason = ""
    if not path.strip():
        reason = "is empty: it would be the working directory"
    elif len(os.fsencode(path)) > _PATH_BYTES or any(len(os.fsencode(name)) > _NAME_BYTES for name in path.split("/")):
        reason = "is longer than a path, or a name in it, can be"
    if reason:
        raise ConfigError(f"{what} = {shown(path)}", reason, "correct the path")


def require_positive(config: Any, section: str, *names: str) -> None:
    """Raise ConfigError unless every field ``names`` of a section's config is a positive whole number."""
    for name in names:
        value = getattr(config, name)
        if value < 1 or isinstance(value, bool):
            raise ConfigError(f"{section}.{name} = {value}", "must be a positive whole number")


def divisors(number: int) -> str:
    """Return the divisors of ``number`` up to 64, for the cure of an error."""
    return ", ".join(str(d) for d in range(1, min(number, 64) + 1) if number % d == 0)
