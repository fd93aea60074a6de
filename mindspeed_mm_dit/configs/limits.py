"""Bounds of settings, and the base of the sections of config files, which check them; values as shown in errors."""

from __future__ import annotations

import dataclasses
import operator
import os
import re
import reprlib
from collections.abc import Mapping
from functools import cache
from types import UnionType
from typing import Annotated, Any, ClassVar, Union, get_args, get_origin, get_type_hints

from mindspeed_mm_dit.errors import ConfigError

MAX_INT64 = 2**63 - 1
"""Largest whole number that tensors, sample indices and NumPy's generators can hold."""
BYTES = (bytes, bytearray, memoryview)
"""Types that Python treats as sequences of whole numbers, but that no setting takes as a list."""
MAX_LAYERS = 1000
"""Most blocks of a network."""
MAX_SAMPLES = 2**62
"""Most samples that a run can consume; sample indices from here on are for validation."""
MAX_THREADS = 1024
"""Most threads that prepare batches."""
MAX_FRAMES = 100_000
"""Most frames of a clip: an hour at 24 per second, more than any model takes."""
MAX_PIXELS = 32_768
"""Largest height or width of a clip, in pixels."""
MAX_GUIDANCE = 1000.0
"""Largest scale of classifier-free guidance; samples degrade from about 20 on, and overflow far beyond this."""
BASE_DTYPES = ("nf4", "int8", "fp8", "bf16")
"""Formats that the weights of a frozen base can be stored in (``framework/low_bit.py``)."""
MAX_STEPS = 1_000_000
"""Most sampling steps; all their times are computed before the first."""
FLOAT32 = (1e-38, 3e38)
"""Smallest and largest magnitude that float32 holds with full precision."""
_NAME_BYTES, _PATH_BYTES = 255, 4096
"""Longest file name and path on Linux, in bytes."""


class _ShortRepr(reprlib.Repr):
    """A ``repr`` of limited length."""

    def repr_int(self, x: int, level: int) -> str:
        """Return a whole number, or its approximate power of ten if it has very many digits."""
        return repr(x) if x.bit_length() < 256 else f"about {'-' if x < 0 else ''}10**{int(x.bit_length() * 0.30103)}"


_short_repr = _ShortRepr()
_short_repr.maxstring = _short_repr.maxother = 120


def shorten_repr(value: Any) -> str:
    """Return ``value`` as shown in errors: its ``repr``, shortened if it is long or deeply nested."""
    return _short_repr.repr(value)


def check_between(what: str, value: float, low: float, high: float, hint: str = "") -> None:
    """Raise ConfigError unless ``low`` <= ``value`` <= ``high``.

    what: the setting, as in "ae.channels"; hint: a sentence about good values, which ends the message.
    """
    if not low <= value <= high:
        allowed = f"at least {low:,}" if value < low else f"a number of at most {high:,}"
        raise ConfigError(f"{what} = {shorten_repr(value)} must be {allowed.removesuffix('.0')}. {hint}")


def whole_number(what: str, value: Any, low: int, high: int = MAX_INT64) -> int:
    """Return ``value``, perhaps a scalar of NumPy or a framework, as an int.

    Raises ConfigError, naming the setting ``what``, unless it is a whole number from ``low`` to ``high``.
    """
    try:
        result = operator.index(value)
    except TypeError:
        result = None
    if result is None or isinstance(value, bool):
        raise ConfigError(f"{what} = {shorten_repr(value)} must be a whole number.")
    check_between(what, result, low, high)
    return result


def number(what: str, value: Any, low: float, high: float) -> float:
    """Return ``value`` as a float; otherwise like :func:`whole_number`."""
    try:
        result = float(value)
    except (TypeError, ValueError, RuntimeError):  # (RuntimeError: tensors of several elements)
        result = None
    if result is None or isinstance(value, (bool, str, bytes)):
        raise ConfigError(f"{what} = {shorten_repr(value)} must be a number.")
    check_between(what, result, low, high)
    return result


def check_bool(what: str, value: Any) -> bool:
    """Return ``value``, perhaps a bool of NumPy, as a bool; raise ConfigError, naming ``what``, if it is not one."""
    if type(value).__name__ not in ("bool", "bool_"):
        raise ConfigError(f"{what} = {shorten_repr(value)} must be true or false.")
    return bool(value)


def check_path(what: str, path: str) -> None:
    """Raise ConfigError for a path that is empty or too long; ``what`` names the setting."""
    problem = ""
    try:
        names = os.fsencode(path).split(b"/")
    except UnicodeEncodeError:
        names = [b"\0"]
    if not path.strip():
        problem = "must not be empty"
    elif any(b"\0" in name for name in names):
        problem = "has a character that is not allowed in a path"
    elif len(b"/".join(names)) > _PATH_BYTES or any(len(name) > _NAME_BYTES for name in names):
        problem = "is too long, or has a name that is too long"
    if problem:
        raise ConfigError(f"{what} = {shorten_repr(path)} {problem}. Correct the path.")


def expand_path(what: str, path: Any) -> str:
    """Return a path as text with "~" expanded; raise ConfigError, naming the setting ``what``, if it is not a path."""
    try:
        expanded = os.path.expanduser(os.fsdecode(path))
    except TypeError:
        raise ConfigError(f"{what} = {shorten_repr(path)} is not a path.") from None
    check_path(what, expanded)
    return expanded


def divisors(number: int) -> str:
    """Return the divisors of ``number`` up to 64, as text for an error."""
    return ", ".join(str(d) for d in range(1, min(number, 64) + 1) if number % d == 0)


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
    raise ConfigError(f"{name} = {text} must be a whole number {allowed}{why}.")


@dataclasses.dataclass(frozen=True)
class Between:
    """The bounds of a number, in the type of a section's field: ``Annotated[int, Between(1, 1000)]``."""

    low: float
    high: float = MAX_INT64
    hint: str = ""
    """A sentence about good values, which ends the message."""
    below: bool = False
    """Whether ``high`` itself is excluded."""

    def check(self, what: str, value: float) -> None:
        """Raise ConfigError, naming the setting ``what``, unless ``value`` is within the bounds."""
        if isinstance(value, bool):
            raise ConfigError(f"{what} = {value} must be a number.")
        if self.below and not self.low <= value < self.high:
            raise ConfigError(f"{what} = {shorten_repr(value)} must lie in [{self.low:g}, {self.high:g}). {self.hint}")
        check_between(what, value, self.low, self.high, self.hint)


class ValidPath:
    """Marks a string that is a path: ``Annotated[str, ValidPath]``."""

    check = staticmethod(check_path)


Positive = Annotated[int, Between(1)]
Count = Annotated[int, Between(0)]
NumLayers = Annotated[int, Between(1, MAX_LAYERS, "Published networks have up to 60.")]
Probability = Annotated[float, Between(0, 1)]
Fraction = Annotated[float, Between(0, 1, below=True)]
PathText = Annotated[str, ValidPath]


class Section:
    """Base of the classes of sections of config files: frozen dataclasses, which check the bounds of their fields."""

    section: ClassVar[str] = ""
    """Name of the section, as shown in errors."""

    def __post_init__(self) -> None:
        for name, annotation in _types_of_fields(type(self)).items():  # type: ignore[arg-type]
            _check_bounds(self.full_key(name), getattr(self, name), annotation)

    def full_key(self, name: str) -> str:
        """Return the name of a setting as shown in errors: "predictor.num_heads"."""
        return f"{self.section}.{name}" if self.section else name

    def error(self, name: str, problem: str) -> ConfigError:
        """Return the error of the setting ``name``; ``problem`` goes on after its value: "must be even. Use 4."."""
        value, annotation = getattr(self, name), _types_of_fields(type(self)).get(name)  # type: ignore[arg-type]
        shown = value if annotation == PathText else _shown(value)
        return ConfigError(f"{self.full_key(name)} = {shown} {problem}")

    def check_divides(self, name: str, whole: str, more: str = "") -> None:
        """Raise ConfigError unless the setting ``name`` divides ``whole``; ``more``: what else can be changed."""
        divisor, number = getattr(self, name), getattr(self, whole)
        if number % divisor:
            raise self.error(
                name,
                f"does not divide {whole}: {number} % {divisor} = {number % divisor}. Use one of "
                f"{divisors(number)}{more}.",
            )


def _shown(value: Any) -> str:
    """Return ``value`` as in a config file, shortened."""
    if isinstance(value, bool):
        return str(value).lower()
    return shorten_repr(list(value) if isinstance(value, tuple) else value)


@cache
def _types_of_fields(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}  # type: ignore[arg-type]


def _check_bounds(what: str, value: Any, annotation: Any) -> None:
    """Raise ConfigError if ``value``, or an entry of a list, is not within the bounds in its type ``annotation``."""
    origin, kinds = get_origin(annotation), get_args(annotation)
    if origin is Annotated and isinstance(value, str) == (kinds[0] is str):
        for bound in annotation.__metadata__:
            bound.check(what, value)
    elif origin is tuple and isinstance(value, tuple):
        if Ellipsis not in kinds and len(value) != len(kinds):
            raise ConfigError(f"{what} = {_shown(value)} must be a list of {len(kinds)} numbers.")
        for position, entry in enumerate(value):
            _check_bounds(f"{what}[{position}]", entry, kinds[0])
    elif origin in (Union, UnionType) and value is not None and not isinstance(value, bool):
        for kind in kinds:
            _check_bounds(what, value, kind)
