"""Waiting threads spin where the cores are theirs, and sleep where other processes want them."""

import os
import threading
from pathlib import Path

import pytest
import torch

from mindspeed_mm_dit.framework.pytorch import cpu_tuning
from mindspeed_mm_dit.framework.pytorch.cpu_tuning import IdleThreads, Used, cores_are_contended
from tests.faults.launched import wait_until

ON_LINUX = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="no /proc here")


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("by_all", "by_us", "threads", "wanted"),
    [
        (8.0, 8.0, 4, False),  # all that is used is used by us
        (8.4, 8.0, 4, False),  # 0.2 of a core by others
        (9.4, 8.0, 4, True),  # 0.7 of a core, which one of four threads has to wait for
        (9.4, 8.0, 3, False),  # three threads still find one each
        (11.0, 4.0, 2, True),
    ],
)
def test_cores_are_wanted_where_threads_do_not_find_one_each(monkeypatch, by_all, by_us, threads, wanted):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4), raising=False)
    assert cores_are_contended(Used(10.0, 100.0, 50.0), Used(12.0, 100.0 + by_all, 50.0 + by_us), threads) is wanted


def threads_of_the_system() -> int:
    return len(os.listdir("/proc/self/task"))


@ON_LINUX
def test_openmp_has_more_threads_than_there_are_cores_while_idle_ones_are_held(two_threads, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(5))
    torch.zeros(1 << 20).add_(1)  # our own team is there
    before, idle = threads_of_the_system(), IdleThreads()
    idle.hold()
    idle.hold()
    wait_until(lambda: threads_of_the_system() == before + 8)  # four teams of two: OpenMP counts 6, with ours
    idle.release()
    wait_until(lambda: threads_of_the_system() == before)


@pytest.mark.parametrize(("variable", "begins"), [(None, True), ("OMP_WAIT_POLICY", False), ("GOMP_SPINCOUNT", False)])
@ON_LINUX
def test_what_the_user_says_of_waiting_holds(two_threads, monkeypatch, variable, begins):
    looked = threading.Event()
    monkeypatch.setattr(cpu_tuning, "_look_on", looked.set)
    monkeypatch.setattr(cpu_tuning, "_watch", None)
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "passive")
    cpu_tuning.tune_openmp_waiting()
    assert (cpu_tuning._watch is not None) is begins
    if begins:
        assert looked.wait(60)
