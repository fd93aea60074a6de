"""Run torchrun, without torchrun's traceback if a rank has already reported the error."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import sys
from collections.abc import Sequence

from mindspeed_mm_dit.framework import activate
from mindspeed_mm_dit.framework.exits import REPORTED_EXIT_CODES
from mindspeed_mm_dit.terminal import echo_if_open
from mindspeed_mm_dit.training.launch.variables import WAIT_SECONDS, Launch

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

    from mindspeed_mm_dit.training.pytorch.agent import SAVING_SECONDS, run_torchrun

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

    from mindspeed_mm_dit.training.pytorch.rendezvous import LoopbackRendezvous

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
