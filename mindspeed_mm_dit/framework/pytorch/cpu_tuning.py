"""Settings of PyTorch on CPUs: how OpenMP's threads wait, and what happens without a C++ compiler."""

from __future__ import annotations

import inspect
import os
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

LOOK_SECONDS = 1.0
SPARE_CORES = 0.3
"""Others may use this many cores before one of our threads has to wait for a core."""
_STAT = Path("/proc/stat")
_TICKS = os.sysconf("SC_CLK_TCK")
_watch: threading.Thread | None = None


def tune_openmp_waiting() -> None:
    """From now on, check once a second whether other processes use the cores.

    Do nothing if an environment variable sets how threads wait, if there is only one thread, or if there is no /proc.
    """
    global _watch
    is_set = not os.environ.keys().isdisjoint(("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"))
    if _watch is None and not is_set and torch.get_num_threads() > 1 and _STAT.is_file():
        _watch = threading.Thread(target=_look_on, name="waiting", daemon=True)
        _watch.start()


def _look_on() -> None:
    idle, before = IdleThreads(), Used.now()
    idle.hold()
    seconds = LOOK_SECONDS / 5  # at first
    while True:
        time.sleep(seconds)
        now = Used.now()
        if cores_are_contended(before, now, torch.get_num_threads()):
            idle.hold()
        else:
            idle.release()
        before, seconds = now, LOOK_SECONDS


class Used(NamedTuple):
    """Seconds that this process's cores have worked up to a moment, for all processes and for this one."""

    moment: float
    by_all: float
    by_us: float

    @classmethod
    def now(cls) -> Used:
        """Read them from /proc/stat and the clocks."""
        cores, worked = {f"cpu{n}" for n in os.sched_getaffinity(0)}, 0
        for name, *ticks in map(str.split, _STAT.read_text().splitlines()):
            if name in cores:
                user, nice, system, _, _, interrupts, soft, stolen = map(int, ticks[:8])
                worked += user + nice + system + interrupts + soft + stolen
        return cls(time.monotonic(), worked / _TICKS, time.process_time())


def cores_are_contended(before: Used, now: Used, threads: int) -> bool:
    """Return whether other processes used too much of the cores for ``threads`` to have one each."""
    others = (now.by_all - before.by_all) - (now.by_us - before.by_us)
    return others / (now.moment - before.moment) > len(os.sched_getaffinity(0)) - threads + SPARE_CORES


class IdleThreads:
    """Idle threads that OpenMP counts: together with the computing threads they outnumber the cores."""

    def __init__(self) -> None:
        self._end = threading.Event()
        self._held: list[threading.Thread] = []

    def hold(self) -> None:
        """Start the threads, unless they are running."""
        if self._held:
            return
        self._end.clear()
        more, cores = torch.get_num_threads() - 1, len(os.sched_getaffinity(0))
        teams = max(1, -(-(cores - more) // more))
        self._held = [threading.Thread(target=self._occupy_omp_team, daemon=True) for _ in range(teams)]
        for thread in self._held:
            thread.start()

    def release(self) -> None:
        """End the threads."""
        self._end.set()
        for thread in self._held:
            thread.join()
        self._held = []

    def _occupy_omp_team(self) -> None:
        torch.zeros(1 << 20).add_(1)  # large enough for a team of threads, which then stays with this one
        self._end.wait()


_UNCOMPILED = "__dynamo_disable"
"""Attribute in which PyTorch stores the variant of a method that its compiler skips."""


def avoid_compiler_import() -> None:
    """Let optimizers be created, saved and loaded without importing ``torch._dynamo``."""
    for name in ("add_param_group", "state_dict", "load_state_dict", "zero_grad"):
        method = getattr(getattr(Optimizer, name), "__wrapped__", None)
        if method is not None and not hasattr(method, _UNCOMPILED):
            setattr(method, _UNCOMPILED, method)


def uncompiled(kind: type[Optimizer]) -> type[Optimizer]:
    """Return the optimizer ``kind`` with a step of the same results that does not import ``torch._dynamo``."""
    plain = inspect.unwrap(kind.step)

    def step(self: Optimizer, closure: Any = None) -> Any:
        with torch.no_grad():
            return plain(self, closure)

    return type(kind.__name__, (kind,), {"step": step})
