"""Start the processes of a run, as ``mm-dit train`` does, and through it examples/dit/pretrain.sh: one, or several
with torchrun or msrun.

The environment variables AI_FRAMEWORK, NPUS_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT and MM_TOOL
configure it. Imports no framework.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from mindspeed_mm_dit.configs.arguments import (
    CONFIG_FILES,
    ENTRY_SCRIPT,
    FLAGS_FILE,
    check_tool,
    config_folder,
    read_train_args,
)
from mindspeed_mm_dit.configs.limits import integer_variable
from mindspeed_mm_dit.errors import ConfigError, nearest
from mindspeed_mm_dit.framework import FRAMEWORKS
from mindspeed_mm_dit.framework.exits import SIGNALS, defer_sigint, exit_on_sigint
from mindspeed_mm_dit.terminal import logger

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 6000
"""Port for several nodes, which must all name the same one; a single node takes a free one."""
MAX_NODES = 16384
MAX_THREADS_A_CORE = 16
PROCESS_BYTES = 200 * 2**20
"""A process holds at least this once it has imported its framework."""
WAIT_SECONDS = 600
"""How long a node waits for the others."""


def train(config: str, flags: Sequence[str]) -> int:
    """Start the processes of a run and wait for them; return its exit code.

    config: a folder, or the name of an embedded one. flags: override those of its train.args.
    """
    exit_on_sigint()  # until a launcher handles the signal and passes it on
    framework = os.environ.get("AI_FRAMEWORK") or FRAMEWORKS[0]
    if framework not in FRAMEWORKS:
        raise ConfigError(
            f"AI_FRAMEWORK = {framework} must be one of {', '.join(FRAMEWORKS)}. {nearest(framework, FRAMEWORKS)}"
        )
    return start(framework, [str(ENTRY_SCRIPT), *_flags_of_config(config_folder(config), framework, flags), *flags])


def start(framework: str, command: Sequence[str]) -> int:
    """Start a script and its flags in the processes that the variables describe; return the exit code of the run."""
    launcher = importlib.import_module(f"mindspeed_mm_dit.training.{framework}.launch")
    launch = read_launch(os.environ, lambda: launcher.count_accelerators() or launcher.CPU_PROCESSES)
    threads = max(_cores() // launch.processes, 1)  # more threads than cores slow each other down
    for name, value in {"OMP_NUM_THREADS": str(threads), **launcher.VARIABLES}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "2")  # FSDP2 in MindSpeed-MM refuses 1
    if launch.is_alone:
        defer_sigint()  # the script handles it from its first lines on
        os.execv(sys.executable, [sys.executable, *command])
    if launch.nodes > 1:
        logger.warning(
            f"node {launch.node_rank} of {launch.nodes}: waiting up to {WAIT_SECONDS // 60} minutes for "
            f"{launch.nodes - 1} other node(s) at MASTER_ADDR:MASTER_PORT = {launch.address}:{launch.port}"
        )
    return int(launcher.start(launch, command))


def _flags_of_config(folder: Path, framework: str, flags: Sequence[str]) -> list[str]:
    """Return the flags of a config folder; raises ConfigError for files that it lacks and ``flags`` do not replace."""
    tool = os.environ.get("MM_TOOL")
    check_tool("MM_TOOL", tool)
    words = read_train_args(folder / FLAGS_FILE)
    replaced = {word.partition("=")[0] for word in (*words, *flags)}
    sharding = {"fsdp2.yaml": "--fsdp2-config-path"}
    needed = {**CONFIG_FILES, **(sharding if "--use-torch-fsdp2" in replaced else {})}
    missing = [file for file, flag in needed.items() if flag not in replaced and not (folder / file).is_file()]
    if missing:
        instead = " ".join(f"{needed[file]} FILE" for file in missing)
        them = "it" if len(missing) == 1 else "them"
        raise ConfigError(f"CONFIG = {folder} lacks {', '.join(missing)}. Write {them}, or add {instead}.")
    return [
        *("--ai-framework", framework),
        *(word for file, flag in (CONFIG_FILES | sharding).items() for word in (flag, str(folder / file))),
        *(("--mm-tool", tool) if tool else ()),
        *words,
    ]


@dataclass(frozen=True)
class Launch:
    """What a launcher starts on this node."""

    processes: int
    """Processes on this node."""
    nodes: int
    """Nodes, each with this number of processes."""
    node_rank: int
    """Number of this node."""
    address: str
    """Where the processes meet: the loopback address on a single node."""
    port: int
    """Port of that address."""

    @property
    def is_alone(self) -> bool:
        """Whether the run is one process, which needs no launcher."""
        return self.nodes * self.processes == 1


def read_launch(environment: Mapping[str, str], default_processes: Callable[[], int]) -> Launch:
    """Return the launch that the variables describe; ``default_processes`` is called if NPUS_PER_NODE is not set.

    Raises:
        ConfigError: naming the variable, its value and what is wrong.
    """
    nodes = integer_variable(environment, "NNODES", 1, 1, MAX_NODES)
    node_rank = integer_variable(environment, "NODE_RANK", 0, 0, nodes - 1, f", as NNODES is {nodes}")
    port = integer_variable(environment, "MASTER_PORT", 0, 1, 65535)
    processes = integer_variable(environment, "NPUS_PER_NODE", 0, 1) or default_processes()
    _check_processes(processes)
    most = MAX_THREADS_A_CORE * _cores()
    integer_variable(
        environment, "OMP_NUM_THREADS", 1, 1, most, f", which is {MAX_THREADS_A_CORE} for each core of this machine"
    )
    if nodes == 1:
        if port:
            check_port(LOOPBACK, port, "Leave it out on a single node, which then takes a free port.")
        return Launch(processes, 1, 0, LOOPBACK, port or free_port())
    address = _address(environment, nodes)
    if node_rank == 0:
        check_port("", port or DEFAULT_PORT, "Set another, the same on every node.")
    return Launch(processes, nodes, node_rank, address, port or DEFAULT_PORT)


def _check_processes(processes: int) -> None:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if processes * PROCESS_BYTES > memory:
        raise ConfigError(
            f"NPUS_PER_NODE = {processes} starts processes that take {processes * PROCESS_BYTES / 2**30:,.0f} GiB "
            f"before they train anything, and this machine has {memory / 2**30:,.0f} GiB. Start fewer."
        )
    if processes > _cores():
        logger.warning(f"warning: NPUS_PER_NODE = {processes}: they share {_cores()} core(s), and will be slow")


def _address(environment: Mapping[str, str], nodes: int) -> str:
    for name in ("MASTER_ADDR", "NODE_RANK"):
        if not environment.get(name):
            raise ConfigError(f"NNODES = {nodes} needs {name} too. Set it on each node.")
    address = environment["MASTER_ADDR"]
    try:
        socket.getaddrinfo(address, None)
    except OSError as error:
        raise ConfigError(
            f"MASTER_ADDR = {address} is no address of a node: {error.strerror}. Name the first node."
        ) from None
    return address


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def free_port() -> int:
    """Return a free port of the loopback address."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def check_port(address: str, port: int, advice: str) -> None:
    """Raise ConfigError, ending in ``advice``, if ``port`` of ``address`` ("": any) cannot be listened on."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port used until just now counts as free
        try:
            probe.bind((address, port))
            probe.listen()
        except OSError as error:
            raise ConfigError(f"MASTER_PORT = {port} cannot be listened on: {error.strerror}. {advice}") from None


class SignalRelay:
    """Passes the signals that stop a run on to its ranks on this node, whenever they arrive and the ranks start.

    ranks: returns the processes of the ranks that live.
    """

    def __init__(self, ranks: Callable[[], set[int]]) -> None:
        self.received: signal.Signals | None = None
        """The first signal."""
        self._ranks, self._notified, self._number = ranks, set[int](), 0
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup: the run outlives its shell
                signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number)
        self._number = self.signal_for(number)
        self._notified.clear()  # a second Ctrl-C interrupts ranks that are saving
        self.pass_on()

    def signal_for(self, number: int) -> int:
        """Return the signal that the ranks get for ``number``."""
        return number

    def pass_on(self) -> bool:
        """Send the last signal to the ranks that have not had it; return whether any rank lives."""
        ranks = self._ranks()
        for rank in ranks - self._notified if self.received is not None else ():
            self._notified.add(rank)
            with suppress(ProcessLookupError):
                os.kill(rank, self._number)
        return bool(ranks)
