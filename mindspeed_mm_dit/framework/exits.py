"""How a process ends before its work is done: its exit codes, its temporary files, an error, and Ctrl-C.

The codes: 2 after an error that was reported, 130 after a Ctrl-C that nothing else handles, and 128 plus the number of
the signal if a run stopped on a signal and has saved (``training/signals.py``).

Before a run has anything to save, Ctrl-C ends the process at once, whatever it is doing. Python itself raises
KeyboardInterrupt. That is lost if a library swallows it (PyTorch does while it imports NumPy), and late if a library
waits in its own code (for other ranks): a rank that continues waits for those that have ended.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn

from mindspeed_mm_dit import framework, terminal
from mindspeed_mm_dit.errors import StepError, UserError

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that stop a run: from outside, Ctrl-C, a closed shell, Ctrl-\\. If several arrive, the first in this
order gives the exit code."""

USER_ERROR = 2
"""Exit code of a run, or of one of its processes, that has reported an error."""

REPORTED_EXIT_CODES = (USER_ERROR, *(128 + number for number in SIGNALS))
"""Exit codes of processes that have reported why they end; a launcher adds nothing."""

SECONDS_TO_REPORT = 5.0
"""How long silent ranks wait for the rank that reports an error that all of them raise: the launcher ends every rank
once the first has exited."""

process_files = ExitStack()
"""Closing it removes the files; that is done at the end of the process, and may be done before."""
atexit.register(process_files.close)


def written(name: str, text: str) -> Path:
    """Write ``text`` to a file in a new temporary folder, and return its path."""
    folder = process_files.enter_context(tempfile.TemporaryDirectory(prefix="mindspeed_mm_dit_"))
    path = Path(folder) / name
    path.write_text(text, encoding="utf-8")
    return path


def leave(code: int) -> NoReturn:
    """End this process at once, without waiting for its threads."""
    process_files.close()
    os._exit(code)


# --- an error ---------------------------------------------------------------------------------------------------------


def end(error: UserError, collective_error: bool = False) -> NoReturn:
    """Print ``error`` and end this process at once with code 2; the launcher ends other ranks that may wait for it.

    collective_error: every rank ends with the same error, and one prints it (as with ``error.is_shared``).
    """
    report_to_launcher(error)
    if terminal.is_reporting_rank() or not (collective_error or error.is_shared):
        report_error(error)
    else:
        time.sleep(SECONDS_TO_REPORT)
    with suppress(OSError):  # the reader of our output is gone
        sys.stdout.flush()
    leave(USER_ERROR)


def report_error(error: UserError) -> None:
    """Print ``error``; if the fault may be ours, with the traceback of its cause."""
    if isinstance(error, StepError):
        traceback.print_exception(error.__cause__)
    terminal.echo_if_open(f"\n{error.formatted}", file=sys.stderr)


def report_to_launcher(error: UserError) -> None:
    """Report ``error`` where the launcher of the active framework looks for the reason."""
    if framework.is_active():  # (the first use of runtime would activate one)
        framework.runtime.report_failure(error)


@contextmanager
def collective_error() -> Iterator[None]:
    """Context in which every rank raises the same UserError: one rank reports it, the others exit in silence."""
    try:
        yield
    except UserError:
        if terminal.is_reporting_rank():
            raise
        time.sleep(SECONDS_TO_REPORT)
        raise SystemExit(USER_ERROR) from None


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------


def exit_on_sigint() -> None:
    """From now on, let Ctrl-C end this process with code 130, and print a line if it reports for all ranks."""
    _on_ctrl_c(_end)


def raise_when_interrupted() -> None:
    """From now on, let Ctrl-C raise KeyboardInterrupt, as Python does."""
    _on_ctrl_c(signal.default_int_handler)


def raise_outside_imports() -> None:
    """From now on, let Ctrl-C raise KeyboardInterrupt, or end this process at once while it imports a module."""
    _on_ctrl_c(_end_imports)


def hold_ctrl_c() -> None:
    """Let Ctrl-C wait, also in the program that this process becomes, until a function above sets what it does."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def _on_ctrl_c(handler: Callable[[int, FrameType | None], object]) -> None:
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # a job in the background: a shell's Ctrl-C is not for it
        signal.signal(signal.SIGINT, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _end_imports(number: int, frame: FrameType | None) -> None:
    at = frame
    while at is not None:
        if at.f_code.co_filename == "<frozen importlib._bootstrap>":
            _end(number, frame)
        at = at.f_back
    raise KeyboardInterrupt


def _end(number: int, frame: FrameType | None) -> None:
    if terminal.is_reporting_rank():
        os.write(2, b"interrupted\n")
    with suppress(Exception):  # the signal may have come in the middle of a print
        sys.stdout.flush()
    leave(128 + number)


@contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """In this context Ctrl-C ends the process silently, even in native code that no Python handler interrupts.

    Nothing changes outside the main thread, which alone may set signal handlers, or if Ctrl-C is ignored.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before in (signal.SIG_IGN, None):
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def print_one_line_on_sigint() -> None:
    """From here on, let a KeyboardInterrupt that nothing else handles end this process with one line and code 130."""
    sys.excepthook = _hide_interrupt_traceback


def _hide_interrupt_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    if terminal.is_reporting_rank():
        terminal.echo_if_open("interrupted", file=sys.__stderr__)  # (torch swaps sys.stderr while it is imported)
    sys.exit(128 + signal.SIGINT)
