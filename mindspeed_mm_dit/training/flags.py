"""The flags of a run: Megatron's, this project's, and those of metrics loggers and callbacks, ours and third-party."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

from mindspeed_mm_dit.configs.arguments import Parser, build_parser, dit_flags
from mindspeed_mm_dit.configs.flag import AddFlags
from mindspeed_mm_dit.configs.run import RunConfig, rows
from mindspeed_mm_dit.errors import ConfigError, flag_of
from mindspeed_mm_dit.training.callbacks.registry import CALLBACKS
from mindspeed_mm_dit.training.loggers.registry import MetricsLoggerSpec, add_flags, enabling_flag, metrics_loggers


def standalone_parser() -> Parser:
    """Return a parser of the Megatron flags that the standalone host understands."""
    parser = build_parser()
    group = parser.add_argument_group("metrics loggers")
    for kind in metrics_loggers():
        if kind.in_megatron:
            add_flags(kind, group)
    return parser


def project_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add all flags that Megatron does not have (an ``extra_args_provider`` in Megatron's sense).

    Raises:
        ConfigError: two parts of a run define the same flag.
    """
    try:
        return dit_flags(parser, *_extra_flags(lambda kind: not kind.in_megatron))
    except argparse.ArgumentError as error:
        raise ConfigError(f"A plugin defines a flag that exists already: {error}. Uninstall it.") from None


def full_parser() -> Parser:
    """Return a parser of all flags of pretrain_dit.py in the standalone host."""
    parser = standalone_parser()
    project_flags(parser)
    return parser


def parse(argv: Sequence[str], parser: Parser | None = None) -> RunConfig:
    """Return the run that ``argv`` describes for the standalone host; raises ConfigError for unknown flags.

    parser: one that also knows the flags of a training script; None: :func:`full_parser`.
    """
    return RunConfig.of(vars((parser or full_parser()).parse_strictly(argv)))


def to_command_line(run: RunConfig) -> list[str]:
    """Return a command line of the standalone host for ``run``: the flags that differ from their defaults."""
    values, words = run.flags(), dict[str, list[str]]()
    for action in full_parser()._actions:
        value = values.get(action.dest, action.default)
        several = list(value) if isinstance(value, (list, tuple)) else [value]
        if value is not None and value != action.default and action.dest not in words:
            words[action.dest] = [flag_of(action.dest), *(map(str, several) if action.nargs != 0 else ())]
    return [word for flag_words in words.values() for word in flag_words]


def without_outputs(args: RunConfig) -> RunConfig:
    """Return the run without its metrics loggers and other outputs, so that it writes nothing."""
    unused = {row.name: row.default for row in rows() if row.is_output}
    return replace(args, parts={**args.parts, **dict.fromkeys(map(enabling_flag, metrics_loggers()))}, **unused)


def ignored_flags(
    args: RunConfig, names: Collection[str], is_selected: Callable[[MetricsLoggerSpec], bool]
) -> list[str]:
    """Return the flags of a command line that have no effect in another host.

    They are the flags ``names``, those of the metrics loggers that ``is_selected`` selects, and those of all callbacks
    of other packages.
    """
    parser = argparse.ArgumentParser(add_help=False)
    adds: list[AddFlags] = [row for row in rows() if row.name in names]
    for add in [*adds, *_extra_flags(is_selected)]:
        add(parser)
    values = args.flags()
    return [flag_of(action.dest) for action in parser._actions if values[action.dest] != action.default]


def _extra_flags(is_selected: Callable[[MetricsLoggerSpec], bool]) -> list[AddFlags]:
    logger_flags = [partial(add_flags, kind) for kind in metrics_loggers() if is_selected(kind)]
    return [*logger_flags, *(callback.flags for callback in CALLBACKS.external())]
