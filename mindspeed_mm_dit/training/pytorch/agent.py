"""torchrun, which passes every signal on to its ranks, whenever it arrives.

torchrun's signal handlers raise an exception wherever the main thread happens to be. If that is between starting a rank
and recording it, the rank never hears of the signal. If it is inside ``Popen.poll``, a lock stays acquired, and
torchrun waits an hour for a rank that has ended. So torchrun runs in another thread, where it installs no handlers, and
the main thread records signals.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from types import FrameType
from typing import Any, ClassVar

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.launcher import api
from torch.distributed.run import parse_args, run

from mindspeed_mm_dit.framework.exits import SIGNALS, leave

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
