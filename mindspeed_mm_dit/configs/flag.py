"""The description of a flag of pretrain_dit.py: one row per field of ``run.RunConfig``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mindspeed_mm_dit.errors import flag_of

Host = Literal["megatron", "native"]
AddFlags = Callable[[Any], None]
"""A function that adds flags to a parser group, as a row does when called."""
NAMES: Mapping[Host, str] = {"megatron": "MindSpeed-MM", "native": "MindSpeed-MM's native engine"}
BOTH: tuple[Host, ...] = ("megatron", "native")
_ROW = "row"


@dataclass(frozen=True)
class Flag:
    """A flag; call it with a parser group to add it there."""

    name: str
    """Name of its field, e.g. ``mm_model`` for --mm-model."""
    help: str | None
    default: Any = None
    takes: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments for argparse; a flag whose default is False takes no value."""
    native: str = ""
    """Key of the native engine's yaml with the same meaning."""
    native_counts: str = ""
    """Key of the native engine's yaml that is computed from it, in other units."""
    added_key: bool = False
    """Whether we add the key ``native``, with this default; the engine itself has no such key."""
    idle_in: tuple[Host, ...] = ()
    """Hosts that accept it and ignore it."""
    refused_in: tuple[Host, ...] = ()
    """Hosts that do not support it, and refuse every value but its default."""
    refusal: str = ""
    """What those hosts do instead; the text follows the host's name."""
    cure: str = "leave it out, or use --host standalone"
    """What to do when it is refused."""
    needs: tuple[str, ...] = ()
    """Flags without which it has no effect."""
    compared: Literal["", "setting", "fact"] = ""
    """How a resumed run compares it with its checkpoint: as a setting, as a fact that run.json keeps under its own
    name, or not at all."""
    when_quiet: bool = True
    """Whether it applies to a run that writes nothing; a flag that writes files has its default there."""

    @property
    def word(self) -> str:
        """The flag as written on a command line."""
        return flag_of(self.name)

    def __call__(self, group: Any, **overrides: Any) -> None:
        """Add the flag to a parser group; ``overrides`` overrides arguments for argparse."""
        takes = {"action": "store_true"} if self.default is False else self.takes
        group.add_argument(self.word, **{"default": self.default, "help": self.help, **takes, **overrides})


def flag(help: str | None, default: Any = None, takes: Mapping[str, Any] | None = None, **meaning: Any) -> Any:
    """Return a dataclass field that is a flag; the arguments are those of :class:`Flag`, which takes the field's name.

    A required flag is None until it is parsed.
    """
    return field(default=default, metadata={_ROW: Flag("", help, default, takes or {}, **meaning)})


def rows_of(group: type) -> list[Flag]:
    """Return the rows of the flags among the fields of the dataclass ``group``, in order."""
    fields = (each for each in dataclasses.fields(group) if _ROW in each.metadata)
    return [dataclasses.replace(each.metadata[_ROW], name=each.name) for each in fields]
