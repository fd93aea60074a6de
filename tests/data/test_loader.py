"""What is prepared ahead of the training thread, and what happens to it when nobody wants it any more."""

import threading

import numpy as np
import pytest

from mindspeed_mm_dit.data.loader import load_batches


class Source:
    """Makes as many batches as it is let, and notes which it made, and in which threads."""

    def __init__(self, permits=100):
        self.permits, self.adapted_starter = threading.Semaphore(permits), threading.Semaphore(0)
        self.made, self.threads = [], set()

    def batch(self, sample_indices):
        self.threads.add(threading.current_thread())
        self.adapted_starter.release()
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
    meeting = threading.Barrier(3)

    class Meeting(Source):
        def batch(self, sample_indices):
            meeting.wait(5)  # breaks where fewer than three come
            return super().batch(sample_indices)

    assert len(list(load_batches(Meeting(), sample_indices(6, []), 3, 3))) == 6


def test_a_loader_that_is_closed_waits_for_nobody_and_begins_nothing_new():
    source = Source(permits=1)
    batches = load_batches(source, sample_indices(10, []), 1, 4)
    next(batches)
    assert source.adapted_starter.acquire(timeout=5) and source.adapted_starter.acquire(timeout=5)
    batches.close()
    (worker,) = source.threads
    assert worker.is_alive()  # held in the second batch
    source.permits.release(100)
    worker.join(20)
    assert not worker.is_alive() and source.made == [0, 1]
