"""How the processes of a run were launched, and how they end.

One report of an error, the right exit code, no orphan.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn

from mindspeed_mm_dit import framework, terminal
from mindspeed_mm_dit.configs.limits import integer_variable
from mindspeed_mm_dit.errors import ConfigError, StepError, UserError


@dataclass(frozen=True)
class LaunchVariables:
    """Names of the environment variables that set the rank of a process, for one framework."""

    rank: str
    """Rank of this process."""
    world_size: str
    """Number of processes."""
    required: tuple[str, ...]
    """Variables that each process also needs if there are several."""


LAUNCH_VARIABLES = {
    "pytorch": LaunchVariables("RANK", "WORLD_SIZE", ("RANK", "MASTER_ADDR", "MASTER_PORT")),
    "mindspore": LaunchVariables("RANK_ID", "MS_WORKER_NUM", ("MS_ROLE", "MS_SCHED_HOST", "MS_SCHED_PORT")),
}

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
_PREFIXES = (
    "MS_",
    "TORCHELASTIC_",
    "RANK",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "WORLD_SIZE",
    "GROUP_",
    "ROLE_",
    "MASTER_",
)


def set_single_process_variables() -> None:
    """Set torchrun's variables for a single process, unless a launcher has set them."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)


def without_launch_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables of torchrun and msrun."""
    return {name: value for name, value in environment.items() if not name.startswith(_PREFIXES)}


def check_launched(environment: Mapping[str, str], framework: str) -> None:
    """Check that a launcher's variables are complete: with some of them, a process waits for others that never come.

    Raises:
        ConfigError: a variable is missing, or contradicts another; the error names it.
    """
    names = LAUNCH_VARIABLES[framework]
    world_size = integer_variable(environment, names.world_size, 1, 1)
    rank = integer_variable(environment, names.rank, 0, 0)
    hint = "Start the run with mm-dit train, torchrun or msrun, or unset this variable if it is left in the shell."
    if rank >= world_size:
        raise ConfigError(
            f"{names.rank} = {rank} is not the number of a process: {names.world_size} is "
            f"{environment.get(names.world_size, 'not set')}. {hint}"
        )
    missing = [name for name in names.required if not environment.get(name)]
    if world_size > 1 and missing:
        raise ConfigError(
            f"{names.world_size} = {world_size} needs {', '.join(missing)} too, by which processes find each other. "
            f"{hint}"
        )


def end_with_launcher(environment: Mapping[str, str]) -> None:
    """Ask the kernel for SIGTERM when the launcher dies, even if it is killed: no rank continues alone.

    This applies to launchers that wait for their processes: torchrun, and msrun with --join. A process that was started
    otherwise may outlive its parent.
    """
    launcher = os.getppid()
    under_msrun = environment.get("MS_ROLE") == "MS_WORKER" and _is_waiting_msrun(launcher)
    if not under_msrun and "TORCHELASTIC_RUN_ID" not in environment:
        return
    die_with_parent(signal.SIGTERM)
    if os.getppid() != launcher:  # it died before the request
        signal.raise_signal(signal.SIGTERM)


def die_with_parent(number: signal.Signals) -> None:
    """On Linux, ask the kernel to send this process ``number`` when its parent dies."""
    _prctl(_PR_SET_PDEATHSIG, number.value)


def adopt_orphans() -> None:
    """On Linux, become the parent of descendants whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    library = ctypes.CDLL(None)
    if hasattr(library, "prctl"):
        library.prctl(option, value)


def children(parent: int) -> set[int]:
    """Return the processes whose parent is ``parent``, on Linux; those that nobody has waited for count too."""
    pids = set[int]()
    for threads in Path(f"/proc/{parent}/task").glob("*/children"):
        with suppress(OSError):  # it has ended
            pids |= set(map(int, threads.read_text().split()))
    return pids


def _is_waiting_msrun(pid: int) -> bool:
    """Return whether process ``pid`` is an msrun that waits for its workers."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return b"\0--join=True\0" in words or b"\0--join\0True\0" in words


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


def write_temporary_file(name: str, text: str) -> Path:
    """Write ``text`` to a file in a new temporary folder, and return its path."""
    folder = process_files.enter_context(tempfile.TemporaryDirectory(prefix="mindspeed_mm_dit_"))
    path = Path(folder) / name
    path.write_text(text, encoding="utf-8")
    return path


def exit_now(code: int) -> NoReturn:
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
    exit_now(USER_ERROR)


def report_error(error: UserError) -> None:
    """Print ``error``; if the fault may be ours, with the traceback of its cause."""
    if isinstance(error, StepError):
        traceback.print_exception(error.__cause__)
    terminal.logger.error(f"\n{error.formatted}")


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
    _set_sigint_handler(_end)


def raise_when_interrupted() -> None:
    """From now on, let Ctrl-C raise KeyboardInterrupt, as Python does."""
    _set_sigint_handler(signal.default_int_handler)


def raise_outside_imports() -> None:
    """From now on, let Ctrl-C raise KeyboardInterrupt, or end this process at once while it imports a module."""
    _set_sigint_handler(_end_imports)


def defer_sigint() -> None:
    """Let Ctrl-C wait, also in the program that this process becomes, until a function above sets what it does."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def _set_sigint_handler(handler: Callable[[int, FrameType | None], object]) -> None:
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
    exit_now(128 + number)


@contextmanager
def exits_on_sigint() -> Iterator[None]:
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
        with suppress(OSError):
            terminal.echo("interrupted", file=sys.__stderr__)  # (torch swaps sys.stderr while it is imported)
    sys.exit(128 + signal.SIGINT)
