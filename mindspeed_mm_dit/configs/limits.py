"""Bounds that do not depend on the machine: largest numbers and longest paths. Also shortens values for errors."""

from __future__ import annotations

import operator
import os
import reprlib
from typing import Any

from mindspeed_mm_dit.errors import ConfigError

LARGEST = 2**63 - 1
"""Largest whole number that tensors, sample indices and NumPy's generators hold."""
BYTES = (bytes, bytearray, memoryview)
"""Types that Python counts among sequences of whole numbers, and that are no list of anything here."""
MOST_LAYERS, DEEP = 1000, "published networks have up to 60"
"""Most blocks of a network, and what to say of more."""
MOST_SAMPLES = 2**62
"""Most samples that a run can consume; sample indices from here on are for validation."""
MOST_THREADS = 1024
"""Most threads that prepare batches."""
MOST_FRAMES = 100_000
"""Most frames of a clip: an hour at 24 per second, more than any model takes."""
MOST_PIXELS = 32_768
"""Largest height or width of a clip, in pixels."""
MOST_GUIDANCE = 1000.0
"""Largest scale of classifier-free guidance; samples are useless from about 20 on, and not finite far beyond this."""
MOST_STEPS = 1_000_000
"""Most steps of a sampling chain; all their times are computed before the first."""
FLOAT32 = (1e-38, 3e38)
"""Smallest and largest magnitude that float32 holds with full precision."""
_NAME_BYTES, _PATH_BYTES = 255, 4096
"""Longest file name and path on Linux, in bytes."""


class _Shown(reprlib.Repr):
    """A ``repr`` of limited length."""

    def repr_int(self, x: int, level: int) -> str:
        """Return a whole number, or its approximate power of ten if it has very many digits."""
        return repr(x) if x.bit_length() < 256 else f"about {'-' if x < 0 else ''}10**{int(x.bit_length() * 0.30103)}"


_shown = _Shown()
_shown.maxstring = _shown.maxother = 120


def short_repr(value: Any) -> str:
    """Return ``value`` as shown in errors: its ``repr``, shortened if it is long or deeply nested."""
    return _shown.repr(value)


def check_between(what: str, value: float, low: float, high: float, cure: str = "") -> None:
    """Raise ConfigError unless ``low`` <= ``value`` <= ``high``; ``what`` names the setting, as in "ae.channels"."""
    if not low <= value <= high:
        reason = f"must be at least {low:,}" if value < low else f"must be a number of at most {high:,}"
        raise ConfigError(f"{what} = {short_repr(value)}", reason, cure)


def whole_number(what: str, value: Any, low: int, high: int = LARGEST) -> int:
    """Return ``value`` as an int, also one of NumPy or a framework.

    Raises ConfigError, naming the setting ``what``, unless it is a whole number from ``low`` to ``high``.
    """
    try:
        found = operator.index(value)
    except TypeError:
        found = None
    if found is None or isinstance(value, bool):
        raise ConfigError(f"{what} = {short_repr(value)}", "must be a whole number")
    check_between(what, found, low, high)
    return found


def number(what: str, value: Any, low: float, high: float) -> float:
    """Return ``value`` as a float, also one of NumPy or a framework; otherwise as :func:`whole_number`."""
    try:
        found = float(value)
    except (TypeError, ValueError, RuntimeError):  # (RuntimeError: tensors of several elements)
        found = None
    if found is None or isinstance(value, (bool, str, bytes)):
        raise ConfigError(f"{what} = {short_repr(value)}", "must be a number")
    check_between(what, found, low, high)
    return found


def switch(what: str, value: Any) -> bool:
    """Return ``value`` as a bool, also one of NumPy; raise ConfigError, naming ``what``, if it is none."""
    if type(value).__name__ not in ("bool", "bool_"):
        raise ConfigError(f"{what} = {short_repr(value)}", "must be true or false")
    return bool(value)


def check_path(what: str, path: str) -> None:
    """Raise ConfigError for a path that is empty or too long; ``what`` names the setting."""
    reason = ""
    try:
        names = os.fsencode(path).split(b"/")
    except UnicodeEncodeError:
        names = [b"\0"]
    if not path.strip():
        reason = "is empty: it would be the working directory"
    elif any(b"\0" in name for name in names):
        reason = "has a character that no path can have"
    elif len(b"/".join(names)) > _PATH_BYTES or any(len(name) > _NAME_BYTES for name in names):
        reason = "is longer than a path, or a name in it, can be"
    if reason:
        raise ConfigError(f"{what} = {short_repr(path)}", reason, "correct the path")


def path_of(what: str, path: Any) -> str:
    """Return a path as text, "~" spelled out; raise ConfigError, naming the setting ``what``, if it is none."""
    try:
        found = os.path.expanduser(os.fsdecode(path))
    except TypeError:
        raise ConfigError(f"{what} = {short_repr(path)}", "is no path") from None
    check_path(what, found)
    return found


def require_positive(config: Any, section: str, *names: str) -> None:
    """Raise ConfigError unless each of the fields ``names`` of a section's config is a positive whole number."""
    for name in names:
        value = getattr(config, name)
        if value < 1 or isinstance(value, bool):
            raise ConfigError(f"{section}.{name} = {value}", "must be a positive whole number")


def divisors(number: int) -> str:
    """Return the divisors of ``number`` up to 64, as text for the cure of an error."""
    return ", ".join(str(d) for d in range(1, min(number, 64) + 1) if number % d == 0)
