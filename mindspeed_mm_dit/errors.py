"""Errors for users. Each one says which setting has which value, what is wrong with it, and what to do.

Anything that a user can cause raises a :class:`UserError`, which the command lines print without a traceback.
``assert`` is for our bugs.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator

from mindspeed_mm_dit.terminal import plain


class UserError(Exception):
    """A mistake outside our code: a setting, a file, an environment.

    Args:
        message: whole sentences: which setting or file has which value, what is wrong with it, and what to do, e.g.
            ``"--steps = 2000 is more than the 1000 timesteps there are. Use fewer."``.
    """

    is_shared = False
    """Whether every rank raises it, so that only the first rank prints it."""

    def __init__(self, message: str) -> None:
        super().__init__(plain(message.strip()))

    @property
    def formatted(self) -> str:
        """What a command prints: the class of the error first, as in a traceback."""
        return f"{type(self).__name__}: {self}"


class ConfigError(UserError):
    """A JSON, YAML, command-line or launch setting that cannot be used."""


class DataError(UserError):
    """Images or labels that are missing, undecodable or out of range."""


class CheckpointError(UserError):
    """A checkpoint that is missing, incomplete, or belongs to another model."""


class PlatformError(UserError):
    """A requested host, framework or device that is not usable here."""


class ConvergenceError(UserError):
    """A run whose loss or gradients are no longer finite."""


class StepError(UserError):
    """A training or validation step that failed on the device, for a reason that could not be checked in advance."""


@contextlib.contextmanager
def wrap_step_errors(what: str) -> Iterator[None]:
    """Turn any exception in ``what``, a part of a run, into a StepError that a user can read."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise StepError(
            f"{what} failed, and its result is not saved. Resume from the last checkpoint. The error was "
            f"{type(error).__name__}: {error}"
        ) from error


def not_installed(what: str, package: str, extra: str) -> PlatformError:
    """Return the error of ``what``, which needs a ``package`` that the ``extra`` of this package installs."""
    return PlatformError(
        f"{what} needs {package}, which is not installed. Install it with pip install {package}, or install this "
        f"package with its extra [{extra}]."
    )


def not_known(setting: str, name: str, known: Iterable[str]) -> ConfigError:
    """Return the error of a ``setting``, shown with its value ``name``, which is none of those ``known``."""
    known = list(known)
    return ConfigError(f"{setting} is unknown. {nearest(name, known)}The known ones are {', '.join(known) or 'none'}.")


def flag_of(name: str) -> str:
    """Return the flag for the attribute ``name``, e.g. ``--mm-model`` for ``mm_model``."""
    return f"--{name.replace('_', '-')}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "Did you mean 'x'? " for the closest of ``known``, or an empty string."""
    close = difflib.get_close_matches(name[:100], list(known), n=1, cutoff=0.5)
    return f"Did you mean {close[0]!r}? " if close else ""
