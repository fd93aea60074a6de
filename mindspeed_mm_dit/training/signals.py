"""A polite request to stop: SIGTERM or SIGINT is noted, and the loop saves before it ends."""

from __future__ import annotations

import signal
import time
from types import FrameType, TracebackType
from typing import Any

from mindspeed_mm_dit.framework import runtime

LAUNCHER_SECONDS = 1.0
"""torchrun passes on a Ctrl-C that the terminal has sent to every process already: so soon after, it is the same."""


class StopRequest:
    """While entered, turns SIGTERM and the first SIGINT into a flag that all ranks share."""

    def __init__(self) -> None:
        self._asked = False
        self._interrupted_at: float | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        if number != signal.SIGINT:
            return
        if self._interrupted_at is None:
            self._interrupted_at = time.monotonic()
        elif time.monotonic() - self._interrupted_at > LAUNCHER_SECONDS:  # a second Ctrl-C interrupts at once
            raise KeyboardInterrupt

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def on_any_rank(self) -> bool:
        """Return whether any rank was asked to stop; every rank must call this equally often."""
        return bool(runtime.any_rank(self._asked))
