"""Prepares batches ahead of the training step: in threads or, for a step that an accelerator computes, in processes.

Threads suffice for a step on the CPU: decoding, resizing and drawing noise release Python's global interpreter lock.
But decoding an image holds it for a moment, and maps and unmaps memory, which slows down a process that launches
kernels: on an H200 twelve threads slowed a step from 65 ms to 178 ms (benchmarks/results/2026-11-26-gpu.md). From a
process, arrays come as memory that both map (memfd_create(2)): they are not copied, and do not need /dev/shm, which
containers keep small.
"""

from __future__ import annotations

import itertools
import mmap
import os
import pickle
import resource
import signal
import socket
import sys
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NoReturn, Protocol

import numpy as np

from mindspeed_mm_dit.data.samples import Batch
from mindspeed_mm_dit.errors import PlatformError

ALIGNMENT = 64
"""Arrays begin at multiples of this many bytes, as in memory that NumPy or PyTorch allocates."""
MAX_MESSAGE_BYTES = 1 << 16
"""Bytes that describe a batch, or an error."""
REQUEST = b"w"
THREADS = 4
"""Threads of a process: more of them wait for one another's lock."""


class BatchSource(Protocol):
    """Makes a batch from sample indices; called from several threads."""

    def batch(self, sample_indices: np.ndarray) -> Batch:
        """Return the arrays of ``sample_indices`` (B,) int64."""


def load_batches(
    samples: BatchSource, sample_indices: Iterable[np.ndarray], num_workers: int, prefetch_batches: int
) -> Generator[Batch, None, None]:
    """Yield ``samples.batch(indices)`` for each array ``indices`` of ``sample_indices``, in order.

    ``num_workers`` threads keep up to ``prefetch_batches`` batches ready; with 0 workers each batch is made
    on request. An error in a worker is raised here, at its batch.
    """
    if num_workers == 0:
        yield from map(samples.batch, sample_indices)
        return
    pool = ThreadPoolExecutor(num_workers, thread_name_prefix="batch")
    ready: deque[Future[Batch]] = deque()
    try:
        for indices in sample_indices:
            ready.append(pool.submit(samples.batch, indices))
            if len(ready) > prefetch_batches:
                yield ready.popleft().result()
        while ready:
            yield ready.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def load_batches_in_process(
    samples: BatchSource, sample_indices: Iterable[np.ndarray], num_workers: int, prefetch_batches: int
) -> Generator[Batch, None, None]:
    """Do what ``load_batches`` does, for ``num_workers`` > 0, in processes forked from this one at the first batch.

    Each has up to ``THREADS`` threads and makes every n-th batch. They end with the generator, or with this process.
    Whatever ``samples`` caches stays in those processes.

    Raises:
        PlatformError: a process was ended from outside.
    """
    count = -(-num_workers // THREADS)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a batch keeps a file open
    sys.stdout.flush(), sys.stderr.flush()  # else the other processes would write the same again
    readers: list[_Worker] = []
    try:
        for first in range(count):
            indices = itertools.islice(sample_indices, first, None, count)  # (of the copy that the fork makes)
            threads = (num_workers + first) // count
            readers.append(_Worker(load_batches(_BatchFiles(samples), indices, threads, -(-prefetch_batches // count))))
        for reader in itertools.cycle(readers):
            if (batch := reader.receive()) is None:
                return
            yield batch
    finally:
        for reader in readers:
            reader.end()


class _Worker:
    """A process that makes ``batches``, and always prepares the next one in advance."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._pipe, child_pipe = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.process = os.fork()
        if self.process == 0:
            self._pipe.close()
            _serve(child_pipe, batches)
        child_pipe.close()
        self._request()

    def receive(self) -> Batch | None:
        """Return the next batch, or None after the last one; raise the error of making it, if there was one."""
        try:
            message, handles, _, _ = socket.recv_fds(self._pipe, MAX_MESSAGE_BYTES, 1)
        except ConnectionResetError:
            message, handles = b"", []
        if not message:
            raise self._ended()
        described = pickle.loads(message)
        if isinstance(described, BaseException):
            raise described
        if described is None:
            return None
        self._request()
        (handle,) = handles
        memory = mmap.mmap(handle, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        os.close(handle)
        return {name: np.ndarray(shape, dtype, memory, offset) for name, dtype, shape, offset in described}

    def end(self) -> None:
        """End the process, also in the middle of a batch."""
        self._pipe.close()
        with suppress(ProcessLookupError, ChildProcessError):  # (if SIGCHLD is ignored, there is nothing to wait for)
            os.kill(self.process, signal.SIGKILL)
            os.waitpid(self.process, 0)

    def _request(self) -> None:
        with suppress(BrokenPipeError):  # (the next ``receive`` reports that it ended)
            self._pipe.send(REQUEST)

    def _ended(self) -> PlatformError:
        """Return the error of a process that has gone, without reaping it."""
        status = None
        with suppress(ChildProcessError):
            status = os.waitid(os.P_PID, self.process, os.WEXITED | os.WNOWAIT)
        how = "signal" if status and status.si_code == os.CLD_KILLED else "status"
        return PlatformError(
            f"The process that reads the data ({self.process}) ended with {how} "
            f"{status.si_status if status else 'unknown'}. If memory ran out, use fewer --num-workers or a smaller "
            "dataloader_param.prefetch_batches. --num-workers 0 reads without such a process."
        )


class _BatchFiles:
    """Makes batches as files in memory, with what describes their arrays."""

    def __init__(self, samples: BatchSource) -> None:
        self._samples = samples

    def batch(self, sample_indices: np.ndarray) -> Any:
        """Return a file descriptor, and name, dtype, shape and offset of each array."""
        arrays, offset, described = self._samples.batch(sample_indices), 0, []
        handle = os.memfd_create("batch")
        with open(handle, "wb", closefd=False) as file:
            for name, array in arrays.items():
                described.append((name, array.dtype, array.shape, offset))
                file.seek(offset)
                file.write(np.ascontiguousarray(array).data)
                offset = -(-file.tell() // ALIGNMENT) * ALIGNMENT
            file.truncate(max(offset, 1))
        return handle, described


def _serve(pipe: socket.socket, batches: Any) -> NoReturn:
    """Answer each request with a batch, None after the last one, or the error of making it; then end the process."""
    # A terminal and some launchers signal every process. The training process decides when to stop, and ends this one.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # else Hugging Face's tokenizers warn of the fork
    try:
        while pipe.recv(1):
            handle, described = next(batches, (None, None))
            socket.send_fds(pipe, [pickle.dumps(described)], [] if handle is None else [handle])
            if handle is not None:
                os.close(handle)
    except BaseException as error:  # (a tokenizer's panic is not an Exception)
        with suppress(OSError):  # (nobody is listening any more)
            pipe.send(_pickled(error))
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(0)


def _pickled(error: BaseException) -> bytes:
    """Return an error of any kind as bytes that can be unpickled, as a RuntimeError with its text if it cannot."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        data = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return data if len(data) < MAX_MESSAGE_BYTES else pickle.dumps(RuntimeError(str(error)[:1000]))
