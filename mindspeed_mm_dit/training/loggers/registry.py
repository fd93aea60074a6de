"""Metrics loggers, which record the curves and pictures of a run.

Their interface, their flags, and those that a run enables. A logger that fails ends only its own curves.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mindspeed_mm_dit.configs.arguments import alone
from mindspeed_mm_dit.configs.run import RunConfig, check_output_folder
from mindspeed_mm_dit.errors import ConfigError, PlatformError, flag_of
from mindspeed_mm_dit.registry import Registry
from mindspeed_mm_dit.terminal import logger


class MetricsLogger(Protocol):
    """Records the scalars and pictures of a run, on the rank that logs."""

    def add(self, iteration: int, values: Mapping[str, float]) -> None:
        """Record values by name; iterations never decrease."""

    def add_picture(self, iteration: int, name: str, pixels: np.ndarray) -> None:
        """Record a picture (H, W, 3) uint8."""

    def close(self) -> None:
        """Finish writing everything to disk."""


class BoardLogger(MetricsLogger):
    """A metrics logger that writes to the ``run`` of a ``package`` with a picture type ``Image``."""

    def __init__(self, package: Any, run: Any) -> None:
        self._package, self._run = package, run

    def add(self, iteration: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=iteration)

    def add_picture(self, iteration: int, name: str, pixels: np.ndarray) -> None:
        self._run.log({name: self._package.Image(pixels)}, step=iteration)

    def close(self) -> None:
        self._run.finish()


@dataclass(frozen=True)
class LoggerContext:
    """The facts of the run that a metrics logger is opened for."""

    iteration: int
    """Steps taken before it is opened."""
    folder: str
    """Where the metrics logger writes; empty if it writes no files."""
    settings: Mapping[str, Any]
    """Flags of the run whose values are numbers, texts, true or false."""


@dataclass(frozen=True)
class MetricsLoggerSpec:
    """A metrics logger as the registry knows it."""

    name: str
    """Prefix of its flags: --NAME-FIELD."""
    config: type
    """Frozen dataclass; each field, made with :func:`flag`, is a flag, and the first enables the logger."""
    open: Callable[[Any, LoggerContext], MetricsLogger]
    """(config, LoggerContext) -> metrics logger. Its first error, now or later, is reported and ends its curves."""
    location: Callable[[Any, Path | None], Path | None] | None = None
    """(config, parent folder of --save, or None) -> its output folder, or None if there is none. The last flag of the
    config names that folder. A metrics logger without ``location`` writes no files."""
    packages: tuple[str, ...] = ()
    """Packages that it imports."""
    install: str = ""
    """What pip installs for it."""
    in_megatron: bool = False
    """Whether Megatron has the same flags, with the same effect."""


def in_save_folder(name: str = "") -> Callable[[Any, Path | None], Path | None]:
    """Return a ``location``: the config's ``save_dir`` or, without it, ``name`` in the parent folder of --save."""
    return lambda config, save_parent: Path(config.save_dir) if config.save_dir else save_parent and save_parent / name


def flag(metavar: str, words: str) -> Any:
    """Return a field of a metrics logger's config: a flag with the help text ``words``, None if it is not given."""
    return dataclasses.field(default=None, metadata={"metavar": metavar, "help": words})


class GuardedLogger(MetricsLogger):
    """A metrics logger whose first error of any kind is reported and ends its curves."""

    def __init__(self, kind: MetricsLoggerSpec, config: Any, opening: LoggerContext) -> None:
        self._name = kind.name
        self._logger: MetricsLogger | None = None
        try:
            self._logger = kind.open(config, opening)
        except Exception as error:  # (whatever its package raises)
            self._give_up(error)

    def add(self, iteration: int, values: Mapping[str, float]) -> None:
        self._do(lambda metrics_logger: metrics_logger.add(iteration, values))

    def add_picture(self, iteration: int, name: str, pixels: np.ndarray) -> None:
        self._do(lambda metrics_logger: metrics_logger.add_picture(iteration, name, pixels))

    def close(self) -> None:
        self._do(lambda metrics_logger: metrics_logger.close())

    def _do(self, what: Callable[[MetricsLogger], None]) -> None:
        if self._logger is None:
            return
        try:
            what(self._logger)
        except Exception as error:  # (whatever its package raises)
            with suppress(Exception):
                self._logger.close()
            self._logger = None
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        words = f"{type(error).__name__}: {error}".splitlines()[0]
        logger.warning(f"warning: {self._name} records no more curves, because of {words}; the run continues")


METRICS_LOGGERS = Registry[MetricsLoggerSpec]("metrics_logger")


def register_metrics_logger(kind: MetricsLoggerSpec) -> None:
    """Register a metrics logger; its file must import no framework.

    Raises:
        ConfigError: another metrics logger has this name.
    """
    METRICS_LOGGERS[kind.name] = kind


def metrics_loggers() -> list[MetricsLoggerSpec]:
    """Return all metrics loggers, those of plugins last."""
    return list(METRICS_LOGGERS.values())


def add_flags(kind: MetricsLoggerSpec, group: Any) -> None:
    """Add the flags of a metrics logger to a group of an argument parser."""
    for field in dataclasses.fields(kind.config):
        group.add_argument(_flag(kind, field), **field.metadata)


def enabling_flag(kind: MetricsLoggerSpec) -> str:
    """Return the name in args of the flag that enables a metrics logger."""
    return f"{kind.name}_{dataclasses.fields(kind.config)[0].name}"


def requested_loggers(
    args: RunConfig, kinds: Sequence[MetricsLoggerSpec] | None = None
) -> list[tuple[MetricsLoggerSpec, Any]]:
    """Return the metrics loggers, of ``kinds`` or of all, that the flags of a run enable, with their configs."""
    requested = []
    for kind in metrics_loggers() if kinds is None else kinds:
        if args.parts[enabling_flag(kind)]:
            names = [field.name for field in dataclasses.fields(kind.config)]
            requested.append((kind, kind.config(**{name: args.parts[f"{kind.name}_{name}"] for name in names})))
    return requested


def open_metrics_loggers(args: RunConfig, iteration: int) -> list[MetricsLogger]:
    """Return the metrics loggers of a run that starts after ``iteration``, on the rank that logs."""
    settings = {name: value for name, value in args.flags().items() if isinstance(value, (bool, int, float, str))}
    return [
        GuardedLogger(kind, config, LoggerContext(iteration, str(_output_folder(kind, config, args) or ""), settings))
        for kind, config in requested_loggers(args)
    ]


def check_metrics_loggers(args: RunConfig, kinds: Sequence[MetricsLoggerSpec] | None = None) -> None:
    """Raise a UserError if a metrics logger, of ``kinds`` or of all, is not installed or has nowhere to write.

    A flag of a metrics logger that the run does not enable is an error too.
    """
    for kind in metrics_loggers() if kinds is None else kinds:
        first, *rest = dataclasses.fields(kind.config)
        for field in rest if not args.parts[enabling_flag(kind)] else ():
            if args.parts[f"{kind.name}_{field.name}"]:
                raise alone(_flag(kind, field), [_flag(kind, first)])
    for kind, config in requested_loggers(args, kinds):
        first, last = dataclasses.fields(kind.config)[0], dataclasses.fields(kind.config)[-1]
        what = f"{_flag(kind, first)} = {getattr(config, first.name)}"
        missing = [package for package in kind.packages if importlib.util.find_spec(package) is None]
        if missing:
            raise PlatformError(
                f"{what} needs {missing[0]}, which is not installed. Run pip install {kind.install}, or drop the flag."
            )
        if kind.location is None:
            continue
        if (folder := _output_folder(kind, config, args)) is None:
            raise ConfigError(f"{what} has no folder to write to. Add --save DIR or {_flag(kind, last)} DIR.")
        check_output_folder(_flag(kind, last), folder, make=False)


def _output_folder(kind: MetricsLoggerSpec, config: Any, args: RunConfig) -> Path | None:
    return kind.location(config, Path(args.save).parent if args.save else None) if kind.location is not None else None


def _flag(kind: MetricsLoggerSpec, field: dataclasses.Field[Any]) -> str:
    return flag_of(f"{kind.name}_{field.name}")
