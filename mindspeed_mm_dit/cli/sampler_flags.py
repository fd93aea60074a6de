"""The flags of samplers: their names and options, read from the objectives."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterable
from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from mindspeed_mm_dit.errors import ConfigError, flag_of
from mindspeed_mm_dit.objectives.registry import OBJECTIVES

OPTIONS = "sampler_options"
"""Attribute of the parsed flags with the sampler options on the command line, by name."""


class _Option(NamedTuple):
    field: dataclasses.Field[Any]
    kind: Any
    samplers: list[str]
    """Samplers that have the option."""


class _StoreOption(argparse.Action):
    """Collects the options on the command line in one dictionary."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        """Store ``values``; the word None stands for None."""
        name = self.dest.removeprefix(f"{OPTIONS}.")
        options = {**getattr(namespace, OPTIONS), name: None if values == "None" else values}
        setattr(namespace, OPTIONS, options)


def add_sampler(parser: argparse.ArgumentParser) -> None:
    """Declare --sampler, with the samplers of every objective, including those of plugins."""
    known = "; ".join(f"of {model_id}: {_first_is_default(kind.samplers)}" for model_id, kind in OBJECTIVES.items())
    parser.add_argument("--sampler", metavar="NAME", help=_plain(known))


def add_sampler_options(parser: argparse.ArgumentParser) -> None:
    """Declare a flag for each field of the samplers' options. A sampler without the option refuses it by name.

    Raises ConfigError if an option of a plugin is already a flag of the command.
    """
    group = parser.add_argument_group("options of some samplers")
    parser.set_defaults(**{OPTIONS: {}})
    for name, option in _options().items():
        flag, words = flag_of(name), option.field.metadata.get("help", "")
        default = option.field.default
        default = f"{default:g}" if isinstance(default, float) else default
        try:
            group.add_argument(
                flag,
                action=_StoreOption,
                dest=f"{OPTIONS}.{name}",
                default=argparse.SUPPRESS,
                type=_type(option.kind),
                metavar=name.rpartition("_")[2].upper(),
                help=_plain(f"{', '.join(option.samplers)}: {words or name} (default {default})"),
            )
        except argparse.ArgumentError:
            raise ConfigError(
                f"option {name!r} of the sampler {option.samplers[0]!r}",
                f"{flag} is a flag of this command already",
                "give the field another name",
            ) from None


def _first_is_default(samplers: Iterable[str]) -> str:
    first, *others = samplers
    return ", ".join([f"{first} (default)", *others])


def _options() -> dict[str, _Option]:
    """Return the options of all samplers by name; an option that several samplers have is one flag."""
    options: dict[str, _Option] = {}
    for objective in OBJECTIVES.values():
        for name, sampler in objective.samplers.items():
            kinds = get_type_hints(sampler.options)
            for field in dataclasses.fields(sampler.options):
                options.setdefault(field.name, _Option(field, kinds[field.name], [])).samplers.append(name)
    return options


def _type(kind: Any) -> Callable[[str], Any]:
    """Return the function that turns a flag's text into a value of ``kind``; the sampler checks the value."""
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    known: tuple[type, ...] = (float, int)
    return next((candidate for candidate in known if candidate in kinds), _boolean if bool in kinds else str)


def _boolean(text: str) -> bool | str:
    return {"true": True, "false": False}.get(text.lower(), text)


def _plain(text: str) -> str:
    """Return ``text`` with percent signs escaped for argparse."""
    return text.replace("%", "%%")
