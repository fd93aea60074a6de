"""Batches made ahead, in threads or in processes of their own: the same arrays, errors at their batch, nothing left."""

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from mindspeed_mm_dit.configs.files import UnusableFile
from mindspeed_mm_dit.data.loader import load_batches, load_batches_in_process
from mindspeed_mm_dit.errors import DataError, PlatformError
from tests.forked import PATIENCE_SECONDS

INDICES = [np.arange(start, start + 3) for start in range(0, 30, 3)]


class Drawn:
    """Arrays of several kinds and lengths, drawn from the indices; ``at`` raises ``error``."""

    def __init__(self, at=None, error=None):
        self.at, self.error = at, error

    def batch(self, sample_indices):
        first = int(sample_indices[0])
        if first == self.at:
            raise self.error
        draw = np.random.default_rng(first)
        return {
            "pixels": draw.integers(0, 256, (3, 3, 5, 7 + first % 2), np.uint8)[:, :, ::-1],  # (not contiguous)
            "noise": draw.standard_normal((3, 300, 7), np.float32),
            "labels": sample_indices,
            "dropped": draw.random(3) < 0.5,
            "none": np.zeros((3, 0), np.float32),
            "process": np.array(os.getpid()),
        }


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_SECONDS)


def apart(source, workers=2):
    return load_batches_in_process(source, iter(INDICES), workers, 2)


@pytest.mark.parametrize(("workers", "processes"), [(4, 1), (9, 3)])
def test_batches_of_processes_equal_those_of_threads(workers, processes):
    theirs, ours = list(apart(Drawn(), workers)), list(load_batches(Drawn(), iter(INDICES), 2, 2))
    assert len(theirs) == len(ours) == len(INDICES)
    assert {int(batch.pop("process")) for batch in ours} == {os.getpid()}
    readers = {int(batch.pop("process")) for batch in theirs}
    assert len(readers) == processes and os.getpid() not in readers and not any(map(lives, readers))
    for one, other in zip(theirs, ours):
        assert list(one) == list(other)
        for name in one:
            assert (one[name].dtype, one[name].shape) == (other[name].dtype, other[name].shape)
            np.testing.assert_array_equal(one[name], other[name])
            assert one[name].ctypes.data % one[name].itemsize == 0
            one[name][...] = 0


@pytest.mark.parametrize(("error", "kind", "text"), [
    (DataError("x.png cannot be read. Remove it."), DataError, "x.png"),
    (UnusableFile("is empty"), UnusableFile, "is empty"),
    (type("Panic", (BaseException,), {})("of a tokenizer"), RuntimeError, "Panic: of a tokenizer"),
    (type("Local", (Exception,), {})("of a kind that no other process knows"), RuntimeError, "Local: of a kind"),
])  # fmt: skip
def test_error_is_raised_at_its_batch(error, kind, text):
    batches = apart(Drawn(at=9, error=error), 9)
    assert [int(next(batches)["labels"][0]) for _ in range(3)] == [0, 3, 6]
    with pytest.raises(kind) as raised:
        next(batches)
    assert text in str(raised.value)
    assert list(batches) == []


def test_signal_to_stop_is_left_to_the_run_and_a_kill_is_named():
    batches = apart(Drawn())
    reader = int(next(batches)["process"])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(reader, number)
    assert len(list(batches)) == len(INDICES) - 1
    batches = apart(Drawn(), 9)
    reader = int(next(batches)["process"])
    os.kill(reader, signal.SIGKILL)
    pytest.raises(PlatformError, list, batches).match(rf"(?s){reader}.*signal 9.*--num-workers")
    assert not lives(reader)


def test_a_loader_that_is_closed_ends_its_process_in_the_middle_of_a_batch():
    class Slow(Drawn):
        def batch(self, sample_indices):
            if sample_indices[0] > 3:
                time.sleep(600)
            return super().batch(sample_indices)

    batches = apart(Slow())
    reader = int(next(batches)["process"])
    batches.close()
    assert not lives(reader)


def test_processes_do_not_outlive_the_one_that_reads_from_it():
    code = (
        "import os, signal; from tests.data.test_loader import *\n"
        "batches = apart(Drawn(), 9); print(*(int(next(batches)['process']) for _ in range(3)), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = python(code)
    assert ended.returncode == -signal.SIGKILL
    until = time.monotonic() + PATIENCE_SECONDS
    while any(lives(int(reader)) for reader in ended.stdout.split()):
        assert time.monotonic() < until
        time.sleep(0.01)


def lives(process):
    """Return whether a process runs; one that has ended and is still to be asked for its status does not."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_many_batches_are_kept_and_errors_told_whatever_the_process_inherited():
    """Few files at once, and nobody who waits for children."""
    code = (
        "import resource, signal; from tests.data.test_loader import *\n"
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "source, held = Drawn(at=300, error=DataError('x.png cannot be read')), []\n"
        "for batch in load_batches_in_process(source, (np.arange(n, n + 3) for n in range(303)), 9, 2): held.append(batch)\n"  # noqa: E501
    )
    ended = python(code)
    assert "DataError: x.png cannot be read" in ended.stderr


class Source:
    """Makes as many batches as it is let, and notes which it made, and in which threads."""

    def __init__(self, permits=100):
        self.permits, self.begun = threading.Semaphore(permits), threading.Semaphore(0)
        self.made, self.threads = [], set()

    def batch(self, sample_indices):
        self.threads.add(threading.current_thread())
        self.begun.release()
        assert self.permits.acquire(timeout=5)
        self.made.append(int(sample_indices[0]))
        return {"positions": sample_indices}


def sample_indices(count, taken):
    """The positions of ``count`` batches; ``taken`` notes those that were asked for."""
    for number in range(count):
        taken.append(number)
        yield np.array([number])


@pytest.mark.parametrize(("num_workers", "prefetch", "ahead"), [(1, 1, 2), (1, 4, 5), (3, 2, 3), (0, 4, 1)])
def test_so_many_batches_are_begun_as_are_to_be_ready_beside_the_one_in_use(num_workers, prefetch, ahead):
    source, taken = Source(), []
    batches = load_batches(source, sample_indices(10, taken), num_workers, prefetch)
    for number in range(2):
        assert next(batches)["positions"] == [number] and len(taken) == ahead + number
    assert [int(batch["positions"][0]) for batch in batches] == list(range(2, 10))
    assert sorted(source.made) == list(range(10)) and 1 <= len(source.threads) <= max(num_workers, 1)
    assert (threading.current_thread() in source.threads) == (num_workers == 0)


def test_so_many_threads_work_at_a_time_as_are_asked_for():
    meeting, source = threading.Barrier(3), Source()
    made, source.batch = source.batch, lambda indices: (meeting.wait(5), made(indices))[1]  # fewer than three break it
    assert len(list(load_batches(source, sample_indices(6, []), 3, 3))) == 6


def test_a_loader_that_is_closed_waits_for_nobody_and_begins_nothing_new():
    source = Source(permits=1)
    batches = load_batches(source, sample_indices(10, []), 1, 4)
    next(batches)
    assert source.begun.acquire(timeout=5) and source.begun.acquire(timeout=5)
    batches.close()
    (worker,) = source.threads
    assert worker.is_alive()  # held in the second batch
    source.permits.release(100)
    worker.join(20)
    assert not worker.is_alive() and source.made == [0, 1]
