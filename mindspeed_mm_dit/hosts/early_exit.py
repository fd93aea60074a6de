"""How a run ends before its last step, in whatever host: the reason is said once, and the shell is given a code.

The codes: 2 where something that was wrong has been named, 130 after a Ctrl-C that nothing else takes, and 128 and the
number of the signal where the run was asked to stop and has saved (``training/signals.py``).
"""

from __future__ import annotations

import signal
import sys
import time
import traceback
from contextlib import suppress
from types import TracebackType
from typing import NoReturn

from mindspeed_mm_dit import framework
from mindspeed_mm_dit.errors import StepError, UserError
from mindspeed_mm_dit.framework.launched import says_it
from mindspeed_mm_dit.framework.temporary_files import leave
from mindspeed_mm_dit.training.exit_codes import USER_ERROR

SECONDS_TO_SAY_IT = 5.0
"""How long the ranks that are silent about an error they all found let the one live that says it: the launcher ends
every rank once the first has gone."""


def end(error: UserError, found_by_all: bool = False) -> NoReturn:
    """Say ``error`` and end this process at once with code 2: other ranks may wait for it, and the launcher ends them.

    found_by_all: every rank ends with the same error, and one says it (as with ``error.is_shared``).
    """
    leave_for_launcher(error)
    if says_it() or not (found_by_all or error.is_shared):
        say(error)
    else:
        time.sleep(SECONDS_TO_SAY_IT)
    with suppress(OSError):  # nobody reads it any more
        sys.stdout.flush()
    leave(USER_ERROR)


def say(error: UserError) -> None:
    """Print ``error``; where the fault may be ours, with what led to it."""
    if isinstance(error, StepError):
        traceback.print_exception(error.__cause__)
    print(f"\n{error}", file=sys.stderr, flush=True)


def leave_for_launcher(error: UserError) -> None:
    """Leave ``error`` where the launcher looks for the reason: a place that each framework has."""
    if framework.is_active():  # (the first use of runtime would activate one)
        framework.runtime.report_failure(error)


def end_in_a_line_when_interrupted() -> None:
    """From here on let a KeyboardInterrupt that nothing else takes end this process with one line and code 130."""
    sys.excepthook = _without_traceback_of_an_interrupt


def _without_traceback_of_an_interrupt(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    if says_it():
        print("interrupted", file=sys.__stderr__, flush=True)  # (torch swaps sys.stderr while it is imported)
    sys.exit(128 + signal.SIGINT)
