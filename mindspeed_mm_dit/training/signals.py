"""Requests to end a run early (signal, time limit, error, callback), and how the ranks agree on them."""

from __future__ import annotations

import math
import os
import signal
import stat
import time
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

from mindspeed_mm_dit.configs.files import error_text
from mindspeed_mm_dit.errors import DataError, UserError
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.framework.exits import SIGNALS, USER_ERROR
from mindspeed_mm_dit.terminal import print_nowhere

LAUNCHER_SECONDS = 1.0
"""The terminal sends Ctrl-C to every process, and torchrun passes it on again: within this time it is the same one."""


@dataclass(frozen=True)
class StopReason:
    """Why a run ends before its last step; the same on every rank, except ``error``."""

    reason: str
    """In words for the log."""
    code: int
    """Exit code of every rank: 128 + the signal's number, 0 when its time is over, or 2 after an error."""
    error: UserError | None = None
    """What went wrong on this rank."""


class StopRequest:
    """While entered, records SIGTERM, SIGHUP, SIGQUIT and the first SIGINT; the ranks agree on them before each step.

    ``minutes``: time limit of the run, counted from now; None: no limit.
    """

    def __init__(self, minutes: int | None = None) -> None:
        self._minutes = minutes
        self._over_at = math.inf if minutes is None else time.monotonic() + 60 * minutes
        self._signals: set[signal.Signals] = set()
        self._error: UserError | None = None
        self._end_reason: str | None = None
        self._interrupted_at: float | None = None
        self._have_agreed = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup: the run outlives its shell
            self._before[number] = signal.signal(number, self._note_signal)
        return self

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.add(signal.Signals(number))
        if number == signal.SIGHUP:
            print_nowhere(*(s for s in (1, 2) if stat.S_ISCHR(os.fstat(s).st_mode)))  # a terminal that is gone
        if number != signal.SIGINT:
            return
        if self._interrupted_at is None:
            self._interrupted_at = time.monotonic()
        elif time.monotonic() - self._interrupted_at > LAUNCHER_SECONDS:  # a second Ctrl-C interrupts at once
            raise KeyboardInterrupt

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if isinstance(error, RuntimeError) and self._interrupted_at is not None and not self._have_agreed:
            raise KeyboardInterrupt from error  # Ctrl-C ended another rank, which had not got here yet

    def note(self, error: Exception) -> None:
        """Keep an error that left the weights unchanged, until the ranks agree to stop."""
        if self._error is None:
            self._error = error if isinstance(error, UserError) else _named(error)

    def request(self, reason: str) -> None:
        """Request an orderly end, with code 0; every rank must call this, with the same ``reason``."""
        self._end_reason = reason

    @property
    def error(self) -> UserError | None:
        """The error that this rank has noted."""
        return self._error

    def agree(self) -> StopReason | None:
        """Return why every rank must stop now, or None to go on; every rank must call this equally often."""
        is_over = time.monotonic() >= self._over_at
        flags = runtime.each_any_over_ranks(
            [self._error is not None, is_over, *(number in self._signals for number in SIGNALS)]
        )
        self._have_agreed = True
        failed, over, *signaled = flags
        if failed:
            return StopReason("stopped by an error", USER_ERROR, self._error)
        for number, on in zip(SIGNALS, signaled):
            if on:
                return StopReason(f"asked to stop by {number.name}", 128 + number)
        if over:
            return StopReason(f"the {self._minutes} minutes of --exit-duration-in-mins are over", 0)
        return StopReason(self._end_reason, 0) if self._end_reason else None


def _named(error: Exception) -> UserError:
    """Return an error of the operating system or of a library as a UserError."""
    named = DataError(f"A batch could not be prepared: {type(error).__name__}: {error_text(error)}.")
    named.__cause__ = error
    return named
