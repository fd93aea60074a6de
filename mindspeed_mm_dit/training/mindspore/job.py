"""The processes of one msrun: whether they are alive, and signals sent to its workers directly."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Iterator
from types import FrameType

import psutil  # MindSpore brings it

from mindspeed_mm_dit.framework.exits import SIGNALS

AGAIN_SECONDS = 1.0
"""A signal this long after the first counts as a second one, and kills the workers at once."""

LAST_SECONDS = 10
"""How long msrun and its scheduler may live once every worker has ended."""


class Job:
    """msrun, its scheduler, and its workers on this node."""

    def __init__(self, msrun: subprocess.Popen[bytes]) -> None:
        self.received: signal.Signals | None = None
        self._received_at = 0.0
        # SIGTERM for any signal: a worker that waits for others in MindSpore would not notice a Ctrl-C.
        self._pass_on = signal.SIGTERM
        self._msrun = msrun
        self._scheduler: psutil.Process | None = None
        self._workers: list[psutil.Process] = []
        self._notified: set[psutil.Process] = set()
        self._last_worker_at = time.monotonic()

    @contextlib.contextmanager
    def noting_signals(self) -> Iterator[None]:
        """While entered, a signal to this process is recorded and passed to the workers."""
        before = {number: signal.getsignal(number) for number in SIGNALS}
        for number, handler in before.items():
            if handler != signal.SIG_IGN:  # nohup
                signal.signal(number, self._note)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self._received_at = signal.Signals(number), time.monotonic()
        elif time.monotonic() - self._received_at > AGAIN_SECONDS:
            self._pass_on = signal.SIGKILL
            self._notified.clear()

    def lives(self) -> bool:
        """Pass on a signal that arrived, and return whether msrun or a worker is still alive.

        Workers that msrun has abandoned are waited for, since they save. A scheduler without workers is killed.
        """
        self._find()
        living = [worker for worker in self._workers if _lives(worker)]
        self._notify(living)
        if living or not self._workers:
            self._last_worker_at = time.monotonic()
        msrun_lives = self._msrun.poll() is None
        if not living and (not msrun_lives or time.monotonic() - self._last_worker_at > LAST_SECONDS):
            self._end_scheduler()
        return msrun_lives or bool(living)

    def _find(self) -> None:
        """Find the processes that msrun has started since the last call."""
        known = {*self._workers, self._scheduler}
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self._msrun.pid).children():
                role = None if child in known else child.environ().get("MS_ROLE")
                if role == "MS_WORKER":
                    self._workers.append(child)
                elif role == "MS_SCHED":
                    self._scheduler = child

    def _notify(self, workers: list[psutil.Process]) -> None:
        if self.received is None:
            return
        for worker in workers:
            if worker not in self._notified:
                self._notified.add(worker)
                with contextlib.suppress(psutil.Error):
                    worker.send_signal(self._pass_on)

    def _end_scheduler(self) -> None:
        if self._scheduler is not None and _lives(self._scheduler):
            with contextlib.suppress(psutil.Error):
                self._scheduler.kill()


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
