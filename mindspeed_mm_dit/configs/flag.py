"""A flag of pretrain_dit.py: one row per field of ``run.RunConfig``, and the argparse types that parse its text."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mindspeed_mm_dit.configs.limits import FLOAT32, MAX_INT64, MAX_THREADS, shorten_repr
from mindspeed_mm_dit.errors import flag_of

AddFlags = Callable[[Any], None]
"""A function that adds flags to a parser group, as a row does when called."""
_ROW = "row"


@dataclass(frozen=True)
class Flag:
    """A flag; call it with a parser group to add it there."""

    name: str
    """Name of its field, e.g. ``mm_model`` for --mm-model."""
    help: str
    default: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments for argparse: type, choices, metavar, nargs. A flag whose default is False takes no value."""
    needs: tuple[str, ...] = ()
    """Flags without which it has no effect."""
    compared: Literal["", "setting", "fact"] = ""
    """How a resumed run compares it with its checkpoint: as a setting, as a fact that run.json stores under the flag's
    name, or not at all."""
    is_output: bool = False
    """Whether it makes a run write files; a run that writes nothing has its default."""

    @property
    def word(self) -> str:
        """The flag as written on a command line."""
        return flag_of(self.name)

    def __call__(self, group: Any, **overrides: Any) -> None:
        """Add the flag to a parser group; ``overrides`` overrides arguments for argparse."""
        options = {"action": "store_true"} if self.default is False else self.options
        group.add_argument(self.word, **{"default": self.default, "help": self.help, **options, **overrides})


def flag(
    help: str,
    default: Any = None,
    *,
    needs: tuple[str, ...] = (),
    compared: Literal["", "setting", "fact"] = "",
    is_output: bool = False,
    **options: Any,
) -> Any:
    """Return a dataclass field that is a flag (:class:`Flag`), which takes the field's name.

    ``options``: further arguments for argparse. A required flag is None until it is parsed.
    """
    row = Flag("", help, default, options, needs, compared, is_output)
    return field(default=default, metadata={_ROW: row})


def rows_of(group: type) -> list[Flag]:
    """Return the rows of the flags among the fields of the dataclass ``group``, in order."""
    fields = (each for each in dataclasses.fields(group) if _ROW in each.metadata)
    return [dataclasses.replace(each.metadata[_ROW], name=each.name) for each in fields]


def number(kind: type, is_valid: Callable[[Any], bool], expected: str) -> Callable[[str], Any]:
    """Return an argparse type that accepts a ``kind`` that is ``is_valid``; its error reads "must be ``expected``"."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:  # (also of a number of thousands of digits)
            value = None
        if value is None or not is_valid(value):
            raise argparse.ArgumentTypeError(f"must be {expected}, not {shorten_repr(text)}")
        return value

    return parse


positive_int = number(int, lambda v: 0 < v <= MAX_INT64, "a positive whole number below 2**63")
unsigned_int = number(int, lambda v: 0 <= v <= MAX_INT64, "a whole number of at least 0, below 2**63")
batches = number(int, lambda v: 0 <= v <= 100_000, "a whole number from 0 to 100000")
threads = number(int, lambda v: 0 <= v <= MAX_THREADS, f"a whole number from 0 to {MAX_THREADS}")
positive_float = number(float, lambda v: FLOAT32[0] <= v <= FLOAT32[1], "a positive number in the range of float32")
finite_float = number(float, math.isfinite, "a number")
fraction = number(float, lambda v: 0 <= v < 1, "a number in [0, 1)")


def window(text: str) -> tuple[float, float]:
    """Parse "LOW,HIGH", two numbers."""
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be two numbers such as 0.875,1, not {shorten_repr(text)}") from None
    return low, high


std = number(float, lambda v: 0.001 <= v <= 0.288, "a width from 0.001 to 0.288, about the plain mean")
