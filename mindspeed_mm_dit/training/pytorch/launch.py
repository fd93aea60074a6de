"""Run torchrun in this process: on one node it listens on the loopback address, and signals reach every rank.

torchrun's own store listens on every address, and its signal handlers raise an exception wherever its main thread
happens to be: a rank that was started but not recorded never hears of the signal, and a lock inside ``Popen.poll``
stays acquired. So it finds a store of ours at its port, and runs in another thread, where it installs no handlers.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from typing import TYPE_CHECKING

from mindspeed_mm_dit.framework import activate
from mindspeed_mm_dit.framework.exits import REPORTED_EXIT_CODES, children, exit_now
from mindspeed_mm_dit.terminal import logger
from mindspeed_mm_dit.training.launch import LOOPBACK, WAIT_SECONDS, Launch, SignalRelay

if TYPE_CHECKING:
    from torch.distributed import TCPStore

CPU_PROCESSES = 1
"""Processes on a node without an accelerator: one, which uses every core."""

_HAS_TOOLS = any(map(shutil.which, ("npu-smi", "nvidia-smi")))
VARIABLES = {} if _HAS_TOOLS else {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
"""Environment variables of the processes, unless the user sets them: on a CPU, glibc keeps the memory that a step
frees. Else the system clears it again for the next step, 8 to 10 % of its time
(benchmarks/results/2026-11-21-freed_memory.md)."""

STORE_SECONDS = 60

POLL_SECONDS = 0.5
"""How late a signal is handled that the kernel delivers to another thread, or that came before a rank was there."""


def count_accelerators() -> int:
    """Return the number of accelerators that PyTorch sees."""
    if not _HAS_TOOLS:
        return 0  # without importing PyTorch
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def start(launch: Launch, command: Sequence[str]) -> int:
    """Run ``command`` in every process of this node; return the exit code of the run."""
    level = os.environ.setdefault("LOGLEVEL", "CRITICAL")  # of torchrun itself: the ranks report their errors
    logging.getLogger("torch.distributed.elastic").setLevel(level)
    environment = dict(os.environ)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # no C++ trace if nodes do not meet: one line reports it
    activate("pytorch")  # reads the level
    os.environ.clear()
    os.environ.update(environment)  # the ranks keep the levels that the user set
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    store = listen_on_loopback(launch.port) if launch.nodes == 1 else None
    arguments = [
        *("--nproc_per_node", str(launch.processes), "--nnodes", str(launch.nodes)),
        *("--node_rank", str(launch.node_rank), "--master_addr", launch.address, "--master_port", str(launch.port)),
        *("--rdzv_conf", f"timeout={WAIT_SECONDS}", *command),
    ]
    relay = SignalRelay(lambda: children(os.getpid()))
    with ThreadPoolExecutor(1) as thread:
        torchrun = thread.submit(run, parse_args(arguments))
        while not wait([torchrun], POLL_SECONDS).done:
            if relay.received is not None and not relay.pass_on():  # all ranks have ended, or the nodes have not met
                exit_now(128 + relay.received)
    del store
    error = torchrun.exception()
    if relay.received is not None:
        return 128 + relay.received
    if isinstance(error, DistError):
        logger.warning(f"the nodes did not meet: {str(error).splitlines()[0]}")
        return 1
    if isinstance(error, ChildFailedError):
        codes = {failure.exitcode for failure in error.failures.values()}
        if reported := [code for code in REPORTED_EXIT_CODES if code in codes]:
            return reported[0]
        logger.warning(error)
        return 1
    if error is not None:
        raise error
    return 0


def listen_on_loopback(port: int) -> TCPStore:
    """Return a store that listens on the loopback address; torchrun uses it as long as it is there.

    A store of torchrun's listens on every address, unless this process has a shared one at its port.
    """
    from torch.distributed import TCPStore

    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
    listening = socket.create_server((LOOPBACK, port), backlog=1024)
    return TCPStore(
        *(LOOPBACK, port, None, True, timedelta(seconds=STORE_SECONDS), False),
        multi_tenant=True,
        master_listen_fd=listening.detach(),
        use_libuv=False,  # in PyTorch 2.7, libuv does not accept a socket that already listens
    )
