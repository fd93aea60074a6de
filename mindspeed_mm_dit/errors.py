"""Every error a user can meet. Each one says: which setting, which value, the reason, the cure.

``assert`` is for our own bugs; whatever a user can cause is a :class:`UserError`, which the
command lines print without a traceback.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator


class UserError(Exception):
    """A mistake outside our code: a setting, a file, an environment.

    Args:
        what: the setting or file and its value, e.g. ``"model.json: predictor.num_heads = 5"``.
        reason: why that cannot work.
        cure: what to do about it; may be empty when the reason already says so.
    """

    is_shared = False
    """Whether every rank raises it, so that the first alone says it."""

    def __init__(self, what: str, reason: str, cure: str = "") -> None:
        self.what, self.reason, self.cure = what, reason, cure
        super().__init__(f"{what}: {reason}" + (f"\n    Cure: {cure}" if cure else ""))

    def __str__(self) -> str:
        return f"{type(self).__name__}: {self.args[0]}"


class ConfigError(UserError):
    """A JSON, YAML, command-line or launch setting that cannot be used."""


class DataError(UserError):
    """Images or labels that are missing, undecodable or out of range."""


class CheckpointError(UserError):
    """A checkpoint that is missing, incomplete, or belongs to another model."""


class PlatformError(UserError):
    """A host, framework or device that is asked for and is not usable here."""


class ConvergenceError(UserError):
    """A run whose numbers are no longer usable (loss or gradients not finite)."""


class StepError(UserError):
    """A step of training or validation that failed on the device, by no fault that could be seen before it."""


@contextlib.contextmanager
def named_step(what: str) -> Iterator[None]:
    """Turn what goes wrong in ``what``, a part of a run, into an error a user can read."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise StepError(
            what,
            f"failed, and what it left is not saved: {type(error).__name__}: {error}",
            "the last checkpoint stands; resume from it",
        ) from error


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "Did you mean 'x'? " for the closest of ``known``, or an empty string."""
    close = difflib.get_close_matches(name[:100], list(known), n=1, cutoff=0.5)
    return f"Did you mean {close[0]!r}? " if close else ""
