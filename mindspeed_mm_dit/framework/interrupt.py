"""Ctrl-C before a run has anything to keep: the process ends at once, whatever it is in.

Python's own way is to raise KeyboardInterrupt, and that is lost where a library swallows it (PyTorch does while it
imports NumPy) and late where one waits in code of its own (for other ranks): a rank that goes on waits for those that
have ended.
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
    """From here on let Ctrl-C end this process with code 130, and with one line if it speaks for all."""
    _on_ctrl_c(_end)


def raise_when_interrupted() -> None:
    """From here on let Ctrl-C raise KeyboardInterrupt, as Python does."""
    _on_ctrl_c(signal.default_int_handler)


def _on_ctrl_c(handler: Callable[[int, FrameType | None], object]) -> None:
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # a job in the background: a shell's Ctrl-C is not for it
        signal.signal(signal.SIGINT, handler)


def _end(number: int, frame: FrameType | None) -> None:
    if says_it():
        os.write(2, b"interrupted\n")
    with suppress(Exception):  # the signal may have come in the middle of a print
        sys.stdout.flush()
    leave(128 + number)


@contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """While entered, Ctrl-C ends this process without a word, in code that no handler of Python's interrupts too.

    Outside the main thread, which alone may say what a signal does, nothing changes; nor where Ctrl-C is ignored.
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
