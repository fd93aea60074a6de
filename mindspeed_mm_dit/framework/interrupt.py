"""Ctrl-C before a run has anything to save: the process ends at once, whatever it is doing.

Python itself raises KeyboardInterrupt. That is lost if a library swallows it (PyTorch does while it imports NumPy), and
late if a library waits in its own code (for other ranks): a rank that goes on waits for those that have ended.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from mindspeed_mm_dit.framework.launched import says_it
from mindspeed_mm_dit.framework.temporary_files import leave


def end_at_once_when_interrupted() -> None:
    """From now on, let Ctrl-C end this process with code 130, and print a line if it reports for all ranks."""
    _on_ctrl_c(_end)


def raise_when_interrupted() -> None:
    """From now on, let Ctrl-C raise KeyboardInterrupt, as Python does."""
    _on_ctrl_c(signal.default_int_handler)


def raise_outside_imports() -> None:
    """From now on, let Ctrl-C raise KeyboardInterrupt, or end this process at once while it imports a module."""
    _on_ctrl_c(_end_imports)


def hold_ctrl_c() -> None:
    """Let Ctrl-C wait, also in the program that this process becomes, until a function above says what it does."""
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
    if says_it():
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
