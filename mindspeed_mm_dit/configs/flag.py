"""What a flag of pretrain_dit.py is: a field of ``run.RunConfig`` with one row that says all there is to say of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Host = Literal["megatron", "native"]
AddFlags = Callable[[Any], None]
"""Adds flags to a group of a parser, as a row does."""
NAMES: Mapping[Host, str] = {"megatron": "MindSpeed-MM", "native": "MindSpeed-MM's native engine"}
BOTH: tuple[Host, ...] = ("megatron", "native")
_ROW = "row"


@dataclass(frozen=True)
class Flag:
    """A flag; called with a group of a parser, it adds itself."""

    name: str
    """Of its field: ``mm_model`` of --mm-model."""
    help: str | None
    default: Any = None
    takes: Mapping[str, Any] = field(default_factory=dict)
    """The rest that argparse is told of it; a flag whose default is False takes nothing."""
    native: str = ""
    """Key of the native engine's yaml that means the same."""
    native_counts: str = ""
    """Key of the native engine's yaml that follows from it, in other units."""
    added_key: bool = False
    """Whether ``native`` is a key that we add, with this default; the engine has no such thing."""
    idle_in: tuple[Host, ...] = ()
    """Hosts that are given it and do nothing with it."""
    refused_in: tuple[Host, ...] = ()
    """Hosts that would train something else than it asks for, and refuse all but its default."""
    refusal: str = ""
    """What they do instead, after the host's name."""
    cure: str = "leave it out, or use --host standalone"
    """What to do where it is refused."""
    needs: tuple[str, ...] = ()
    """Flags without which it means nothing."""
    compared: Literal["", "setting", "fact"] = ""
    """What a resumed run compares with its checkpoint: a setting, or a fact that run.json has under its own name."""
    when_quiet: bool = True
    """Whether a run that leaves nothing behind acts on it; a flag that writes or draws has its default there."""

    @property
    def word(self) -> str:
        """The flag as a command line has it."""
        return spelled(self.name)

    def __call__(self, group: Any, **otherwise: Any) -> None:
        """Add the flag to a group of a parser, where it may take something ``otherwise``."""
        takes = {"action": "store_true"} if self.default is False else self.takes
        group.add_argument(self.word, **{"default": self.default, "help": self.help, **takes, **otherwise})


def flag(help: str | None, default: Any = None, takes: Mapping[str, Any] | None = None, **meaning: Any) -> Any:
    """Return a field that is a flag; the arguments are those of :class:`Flag`, whose name is the field's.

    One that is required on a command line has None until it is given.
    """
    return field(default=default, metadata={_ROW: Flag("", help, default, takes or {}, **meaning)})


def rows_of(group: type) -> list[Flag]:
    """Return the rows of the flags that are fields of the dataclass ``group``, in order."""
    fields = (each for each in dataclasses.fields(group) if _ROW in each.metadata)
    return [dataclasses.replace(each.metadata[_ROW], name=each.name) for each in fields]


def spelled(name: str) -> str:
    """Return the flag, as a command line has it, that args has as ``name``."""
    return f"--{name.replace('_', '-')}"
