"""Run torchrun.

Its store is out of other machines' reach, every signal reaches the ranks, and errors are reported once.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from types import FrameType
from typing import Any, ClassVar

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.launcher import api
from torch.distributed.run import parse_args, run

from mindspeed_mm_dit.framework import activate
from mindspeed_mm_dit.framework.exits import REPORTED_EXIT_CODES, SIGNALS, leave
from mindspeed_mm_dit.terminal import echo_if_open
from mindspeed_mm_dit.training.launch import WAIT_SECONDS, Launch

CPU_PROCESSES = 1
"""Processes on a node without an accelerator: one, which uses every core."""

VARIABLES: dict[str, str] = {}
"""Environment variables of the processes, unless the user sets them: none, since threads decide how to wait."""

MOST_SAVING_SECONDS = 3600
"""How long ranks that received a signal to stop may save before they are killed; torchrun's default is 30."""


def count_accelerators() -> int:
    """Return the number of accelerators that PyTorch sees."""
    if not shutil.which("npu-smi") and not shutil.which("nvidia-smi"):
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
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from mindspeed_mm_dit.training.pytorch.launch import SAVING_SECONDS, run_torchrun

    os.environ.setdefault(SAVING_SECONDS, str(MOST_SAVING_SECONDS))
    rendezvous = _single_node_arguments(launch) if launch.nodes == 1 else _multi_node_arguments(launch)
    try:
        run_torchrun(["--nproc_per_node", str(launch.processes), *rendezvous, *command])
    except SignalException as error:  # passed on to the ranks, which have ended by now
        return 128 + error.sigval
    except DistError as error:
        echo_if_open(f"the nodes did not meet: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    except ChildFailedError as error:
        codes = {failure.exitcode for failure in error.failures.values()}
        if reported := [code for code in REPORTED_EXIT_CODES if code in codes]:
            return reported[0]
        echo_if_open(error, file=sys.stderr)
        return 1
    return 0


def _single_node_arguments(launch: Launch) -> list[str]:
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    from mindspeed_mm_dit.training.pytorch.launch import LoopbackRendezvous

    rendezvous_handler_registry.register("loopback", LoopbackRendezvous)
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
    return ["--rdzv_backend", "loopback", "--rdzv_endpoint", f"{launch.address}:{launch.port}"]


def _multi_node_arguments(launch: Launch) -> list[str]:
    return [
        *("--nnodes", str(launch.nodes), "--node_rank", str(launch.node_rank)),
        *("--master_addr", launch.address, "--master_port", str(launch.port)),
        *("--rdzv_conf", f"timeout={WAIT_SECONDS}"),
    ]


STORE_SECONDS = 60


class LoopbackRendezvous(RendezvousHandler):
    """A rendezvous of torchrun's agent alone, with a store on the loopback address (torchrun's own listens on all).

    endpoint: "127.0.0.1:PORT".
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        address, port = parameters.endpoint.split(":")
        self._info = RendezvousStoreInfo(address, int(port))
        self._listening = socket.create_server((address, int(port)), backlog=1024)
        # In PyTorch 2.7, libuv does not accept a socket that already listens.
        self._store = TCPStore(
            address,
            int(port),
            1,
            True,
            timedelta(seconds=STORE_SECONDS),
            multi_tenant=True,
            master_listen_fd=self._listening.detach(),
            use_libuv=False,
        )

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, self._info)

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "loopback"

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing: there are no other agents to notify."""

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


SAVING_SECONDS = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Environment variable: how long ranks that received a signal to stop may save before they are killed."""
POLL_SECONDS = 1.0
"""How late the main thread handles a signal that the kernel delivers to another thread."""


class SignalAgent(LocalElasticAgent):
    """torchrun's agent: the first signal ends its ranks, and later ones are sent to them too."""

    agent: ClassVar[SignalAgent | None] = None
    """The agent, as soon as it starts ranks."""
    received: ClassVar[signal.Signals | None] = None
    """The first signal."""

    @classmethod
    def handle(cls, number: int, frame: FrameType | None) -> None:
        """Handle a signal, in the main thread."""
        is_first = cls.received is None
        cls.received = cls.received or signal.Signals(number)
        if cls.agent is None:
            leave(128 + number)
        if is_first or cls.agent._pcontext is None:
            return
        running = [rank.proc for rank in cls.agent._pcontext.subprocess_handlers.values() if rank.proc.poll() is None]
        for process in running:  # a second Ctrl-C interrupts ranks that are saving
            process.send_signal(number)
        if not running:  # other nodes are waited for
            leave(128 + cls.received)

    def _raise_received(self) -> None:
        if self.received is not None:
            # torchrun of PyTorch 2.7 would kill ranks that save for more than 30 seconds
            if self._pcontext is not None:
                self._pcontext.close(self.received, int(os.environ[SAVING_SECONDS]))
            raise SignalException(f"received {self.received.name}", self.received)

    def _start_workers(self, worker_group: Any) -> dict[int, Any]:
        SignalAgent.agent = self
        self._raise_received()
        return super()._start_workers(worker_group)

    def _monitor_workers(self, worker_group: Any) -> Any:
        self._raise_received()
        return super()._monitor_workers(worker_group)


def run_torchrun(arguments: Sequence[str]) -> None:
    """Run torchrun; raises its exceptions, SignalException once every rank has ended after a signal."""
    api.LocalElasticAgent = SignalAgent
    for number in SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup: the run outlives its shell
            signal.signal(number, SignalAgent.handle)
    with ThreadPoolExecutor(1) as thread:
        torchrun = thread.submit(run, parse_args(arguments))
        while not wait([torchrun], POLL_SECONDS).done:
            pass
        torchrun.result()
