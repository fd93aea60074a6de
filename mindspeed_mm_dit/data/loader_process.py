"""Prepares batches in a process of their own, for a step that an accelerator computes.

Decoding an image holds Python's global interpreter lock for a moment, and maps and unmaps memory. Threads of the
process that launches the step's kernels slow it down: on an H200 a step of 65 ms took 178 beside twelve of them
(benchmarks/results/2026-11-26-gpu.md). Arrays come as memory that both processes map (memfd_create(2)): they are not
copied, and do not need /dev/shm, which containers keep small.
"""

from __future__ import annotations

import mmap
import os
import pickle
import signal
import socket
import sys
from collections.abc import Generator, Iterable
from contextlib import suppress
from typing import Any, NoReturn

import numpy as np

from mindspeed_mm_dit.data.loader import BatchSource, load_batches
from mindspeed_mm_dit.data.samples import Batch
from mindspeed_mm_dit.errors import PlatformError

ALIGNMENT = 64
"""Arrays begin at multiples of so many bytes, as in memory that NumPy or PyTorch allocates."""
LONGEST_MESSAGE = 1 << 16
"""Bytes that describe a batch, or an error."""
WANTED = b"w"


def load_batches_apart(
    samples: BatchSource, sample_indices: Iterable[np.ndarray], num_workers: int, prefetch_batches: int
) -> Generator[Batch, None, None]:
    """Do what ``load_batches`` does, for ``num_workers`` > 0, in a process forked from this one at the first batch.

    It ends with the generator, or with this process. What ``samples`` remembers of what it read, it remembers there.

    Raises:
        PlatformError: the process was ended from outside.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sys.stdout.flush(), sys.stderr.flush()  # else the other process would write the same again
    reader = os.fork()
    if reader == 0:
        ours.close()
        _serve(theirs, load_batches(_Handed(samples), sample_indices, num_workers, prefetch_batches))
    theirs.close()
    try:
        _ask(ours)
        while (batch := _receive(ours, reader)) is not None:
            _ask(ours)  # so that the next one is on its way while this one is used
            yield batch
    finally:
        ours.close()
        os.kill(reader, signal.SIGKILL)
        os.waitpid(reader, 0)


class _Handed:
    """Makes batches as files in memory, with what describes their arrays."""

    def __init__(self, samples: BatchSource) -> None:
        self._samples = samples

    def batch(self, sample_indices: np.ndarray) -> Any:
        """Return a file descriptor, and of each array name, dtype, shape and place."""
        arrays, place, described = self._samples.batch(sample_indices), 0, []
        handle = os.memfd_create("batch")
        with open(handle, "wb", closefd=False) as file:
            for name, array in arrays.items():
                described.append((name, array.dtype, array.shape, place))
                file.seek(place)
                file.write(np.ascontiguousarray(array).data)
                place = -(-file.tell() // ALIGNMENT) * ALIGNMENT
            file.truncate(max(place, 1))
        return handle, described


def _serve(pipe: socket.socket, batches: Any) -> NoReturn:
    """Answer each request with a batch, with None after the last one, or with the error of making it; end unasked."""
    # A terminal and some launchers signal every process; that of the step decides when to stop, and ends this one.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # else Hugging Face's warn of the fork
    try:
        while pipe.recv(1):
            handle, described = next(batches, (None, None))
            socket.send_fds(pipe, [pickle.dumps(described)], [] if handle is None else [handle])
            if handle is not None:
                os.close(handle)
    except Exception as error:
        pipe.send(_pickled(error))
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(0)


def _pickled(error: Exception) -> bytes:
    """Return an error of any kind as bytes that can be read back; what cannot be is told in words."""
    try:
        found = pickle.dumps(error)
        pickle.loads(found)
    except Exception:
        found = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return found if len(found) < LONGEST_MESSAGE else pickle.dumps(RuntimeError(str(error)[:1000]))


def _ask(pipe: socket.socket) -> None:
    with suppress(BrokenPipeError):  # (the next answer tells of its end)
        pipe.send(WANTED)


def _receive(pipe: socket.socket, reader: int) -> Batch | None:
    """Return the next batch, or None after the last one; raise what was raised where it was made."""
    try:
        message, handles, _, _ = socket.recv_fds(pipe, LONGEST_MESSAGE, 1)
    except ConnectionResetError:
        message, handles = b"", []
    if not message:
        raise _ended(reader)
    found = pickle.loads(message)
    if isinstance(found, Exception):
        raise found
    if found is None:
        return None
    (handle,) = handles
    memory = mmap.mmap(handle, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    os.close(handle)
    return {name: np.ndarray(shape, dtype, memory, place) for name, dtype, shape, place in found}


def _ended(reader: int) -> PlatformError:
    """Return the error of a process that has gone, and leave its status to be read."""
    status = os.waitid(os.P_PID, reader, os.WEXITED | os.WNOWAIT)
    how = "signal" if status and status.si_code == os.CLD_KILLED else "status"
    return PlatformError(
        f"the process that reads the data ({reader})",
        f"ended with {how} {status.si_status if status else 'unknown'}",
        "if memory ran out: fewer --num-workers, or a smaller dataloader_param.prefetch_batches; --num-workers 0 reads "
        "without such a process",
    )
