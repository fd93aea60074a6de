"""Threads of a CPU that wait for each other spin while the cores are theirs, and sleep while others want the cores.

OpenMP's threads meet hundreds of times a step. To spin until the others come is fastest on a quiet machine; beside a
busy process it keeps from a core those that are waited for, and a step takes four times as long. GNU's OpenMP reads how
to wait when it is loaded, but where it has more threads than there are cores it hardly spins (its manual on
GOMP_SPINCOUNT). So while others want the cores, some threads are held that do nothing. Results are the same to the bit.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import NamedTuple

import torch

LOOK_SECONDS = 1.0
SPARE_CORES = 0.3
"""So much of the cores may others use before a thread of ours has to wait for one."""
_STAT = Path("/proc/stat")
_TICKS = os.sysconf("SC_CLK_TCK")
_watch: threading.Thread | None = None


def wait_as_the_machine_allows() -> None:
    """Look once a second, from now on, whether other processes want the cores.

    Nothing is done where a variable says how threads wait, where there is one thread, and where there is no /proc.
    """
    global _watch
    is_told = not os.environ.keys().isdisjoint(("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"))
    if _watch is None and not is_told and torch.get_num_threads() > 1 and _STAT.is_file():
        _watch = threading.Thread(target=_look_on, name="waiting", daemon=True)
        _watch.start()


def _look_on() -> None:
    idle, before = IdleThreads(), Used.now()
    idle.hold()
    seconds = LOOK_SECONDS / 5  # at first
    while True:
        time.sleep(seconds)
        now = Used.now()
        if are_wanted(before, now, torch.get_num_threads()):
            idle.hold()
        else:
            idle.release()
        before, seconds = now, LOOK_SECONDS


class Used(NamedTuple):
    """Seconds that the cores of this process have worked, for all processes and for this one, at a moment."""

    moment: float
    by_all: float
    by_us: float

    @classmethod
    def now(cls) -> Used:
        """Read them."""
        cores, worked = {f"cpu{n}" for n in os.sched_getaffinity(0)}, 0
        for name, *ticks in map(str.split, _STAT.read_text().splitlines()):
            if name in cores:
                user, nice, system, _, _, interrupts, soft, stolen = map(int, ticks[:8])
                worked += user + nice + system + interrupts + soft + stolen
        return cls(time.monotonic(), worked / _TICKS, time.process_time())


def are_wanted(before: Used, now: Used, threads: int) -> bool:
    """Return whether other processes used so much of the cores that ``threads`` do not find one each."""
    others = (now.by_all - before.by_all) - (now.by_us - before.by_us)
    return others / (now.moment - before.moment) > len(os.sched_getaffinity(0)) - threads + SPARE_CORES


class IdleThreads:
    """Threads that OpenMP counts and that do nothing, more than there are cores together with those that compute."""

    def __init__(self) -> None:
        self._end = threading.Event()
        self._held: list[threading.Thread] = []

    def hold(self) -> None:
        """Begin them, unless they are there."""
        if self._held:
            return
        self._end.clear()
        more, cores = torch.get_num_threads() - 1, len(os.sched_getaffinity(0))
        teams = max(1, -(-(cores - more) // more))
        self._held = [threading.Thread(target=self._be_a_team, daemon=True) for _ in range(teams)]
        for thread in self._held:
            thread.start()

    def release(self) -> None:
        """End them."""
        self._end.set()
        for thread in self._held:
            thread.join()
        self._held = []

    def _be_a_team(self) -> None:
        torch.zeros(1 << 20).add_(1)  # large enough to be shared out to a team, which then stays with this thread
        self._end.wait()
