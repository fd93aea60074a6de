"""End a run before its last step, in any host: print the reason once, and give the shell an exit code.

The codes: 2 after an error that was reported, 130 after a Ctrl-C that nothing else handles, and 128 plus the number of
the signal if the run was asked to stop and has saved (``training/signals.py``).
"""

from __future__ import annotations

import signal
import sys
import time
import traceback
from contextlib import suppress
from types import TracebackType
from typing import NoReturn

from mindspeed_mm_dit import framework, terminal
from mindspeed_mm_dit.errors import StepError, UserError
from mindspeed_mm_dit.framework.launched import says_it
from mindspeed_mm_dit.framework.temporary_files import leave
from mindspeed_mm_dit.training.exit_codes import USER_ERROR

SECONDS_TO_SAY_IT = 5.0
"""How long silent ranks wait for the rank that reports an error they all found: the launcher ends every rank once the
first has exited."""


def end(error: UserError, found_by_all: bool = False) -> NoReturn:
    """Print ``error`` and end this process at once with code 2; the launcher ends other ranks that may wait for it.

    found_by_all: every rank ends with the same error, and one prints it (as with ``error.is_shared``).
    """
    leave_for_launcher(error)
    if says_it() or not (found_by_all or error.is_shared):
        say(error)
    else:
        time.sleep(SECONDS_TO_SAY_IT)
    with suppress(OSError):  # nobody reads our output any more
        sys.stdout.flush()
    leave(USER_ERROR)


def say(error: UserError) -> None:
    """Print ``error``; if the fault may be ours, with the traceback of its cause."""
    if isinstance(error, StepError):
        traceback.print_exception(error.__cause__)
    terminal.tell(f"\n{error}", file=sys.stderr)


def leave_for_launcher(error: UserError) -> None:
    """Report ``error`` where the launcher of the active framework looks for the reason."""
    if framework.is_active():  # (the first use of runtime would activate one)
        framework.runtime.report_failure(error)


def end_in_a_line_when_interrupted() -> None:
    """From here on, let a KeyboardInterrupt that nothing else handles end this process with one line and code 130."""
    sys.excepthook = _without_traceback_of_an_interrupt


def _without_traceback_of_an_interrupt(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    if says_it():
        terminal.tell("interrupted", file=sys.__stderr__)  # (torch swaps sys.stderr while it is imported)
    sys.exit(128 + signal.SIGINT)
