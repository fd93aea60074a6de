"""Ctrl-C while a process waits for others in a library's own code, where no handler of Python is called."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """While entered, Ctrl-C ends this process at once and without a word, whatever it waits for.

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
