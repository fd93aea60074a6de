"""Run msrun so that its workers save when they receive a signal to stop, and no process outlives the run.

msrun itself answers Ctrl-C by killing its workers, and SIGTERM by abandoning them. So it runs in a new session,
where no signal reaches it, and the workers get signals directly.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from mindspeed_mm_dit.errors import PlatformError
from mindspeed_mm_dit.framework.exits import (
    REPORTED_EXIT_CODES,
    adopt_orphans,
    children,
    die_with_parent,
    without_launch_variables,
)
from mindspeed_mm_dit.terminal import logger
from mindspeed_mm_dit.training.launch import WAIT_SECONDS, Launch, SignalRelay

CPU_PROCESSES = 2
"""Processes on a node without an accelerator."""

VARIABLES = {"OMP_WAIT_POLICY": "passive"}
"""Environment variables of the processes, unless the user sets them: spinning threads slow a busy machine down."""

LOGS = "msrun_log"
"""Folder of the logs, with one folder per run."""

POLL_SECONDS = 0.2
AGAIN_SECONDS = 1.0
"""A signal this long after the first is a second one, and ends the workers at once."""
LAST_SECONDS = 10.0
"""How long msrun and its scheduler may live once every worker has ended."""
_NOISE = "[INFO] DISTRIBUTED("
"""Prefix of the lines that MindSpore prints when a worker leaves the group, whatever GLOG_v is."""


def count_accelerators() -> int:
    """Return the number of NPUs of this machine that may be used."""
    if visible := os.environ.get("ASCEND_RT_VISIBLE_DEVICES"):
        return len([device for device in visible.split(",") if device])
    if not shutil.which("npu-smi"):
        return 0
    listed = subprocess.run(["npu-smi", "info", "-l"], capture_output=True, text=True, check=False).stdout
    return len(re.findall("NPU ID", listed))


def start(launch: Launch, command: Sequence[str]) -> int:
    """Run ``command`` in every worker of this node; return the exit code of the run."""
    _check_msrun()
    logs = _make_log_folder()
    first = launch.node_rank * launch.processes
    lines = _NewLines([logs / f"worker_{first + n}.log" for n in range(launch.processes)])
    adopt_orphans()  # workers whose msrun was killed: they save
    with open(logs / "msrun.log", "w", encoding="utf-8") as log_file:
        process = subprocess.Popen(
            [sys.executable, "-m", "mindspore.parallel.cluster.run", *_arguments(launch, logs), *command],
            env=_environment(launch),
            stdout=log_file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(signal.SIGKILL),
        )
    relay = _WorkerRelay(lambda: _workers(process.pid))
    had_workers, last_worker_at = False, time.monotonic()
    while (has_workers := relay.pass_on()) or process.poll() is None:
        had_workers |= has_workers
        last_worker_at = time.monotonic() if has_workers else last_worker_at
        if had_workers and time.monotonic() - last_worker_at > LAST_SECONDS:
            break
        time.sleep(POLL_SECONDS)
        lines.print()
    lines.print()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # its scheduler, which waits for more workers
    return _exit_code(relay.received, process.wait(), logs)


class _WorkerRelay(SignalRelay):
    """Passes every signal on as SIGTERM: a worker that waits in MindSpore would not notice a Ctrl-C."""

    _first_at: float | None = None

    def signal_for(self, number: int) -> int:
        """Return SIGTERM, and SIGKILL for a signal that comes AGAIN_SECONDS after the first."""
        now = time.monotonic()
        self._first_at = self._first_at or now
        return signal.SIGKILL if now - self._first_at > AGAIN_SECONDS else signal.SIGTERM


def _workers(msrun: int) -> set[int]:
    """Return the workers of this node that are alive, also those that msrun has abandoned."""
    workers = set()
    for pid in children(msrun) | children(os.getpid()):
        with suppress(OSError):
            if b"\0MS_ROLE=MS_WORKER\0" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():  # (empty: a zombie)
                workers.add(pid)
    return workers


class _NewLines:
    """Prints what the workers append to their logs: whole lines, one worker after the other."""

    def __init__(self, logs: Sequence[Path]) -> None:
        self._read = dict.fromkeys(logs, 0)

    def print(self) -> None:
        """Print the new lines."""
        for log, start in self._read.items():
            if not log.exists():
                continue
            with open(log, "rb") as file:
                file.seek(start)
                gathered, newline, _ = file.read().rpartition(b"\n")
            self._read[log] = start + len(gathered + newline)
            for line in gathered.decode("utf-8", "replace").splitlines():
                if not line.startswith(_NOISE):
                    logger.info(line)


def _check_msrun() -> None:
    """Raise PlatformError unless this interpreter has msrun, and msrun's ``python`` is this interpreter."""
    if importlib.util.find_spec("mindspore") is None:
        raise PlatformError(
            "msrun belongs to MindSpore, which is not installed here. Install it with make demo-mindspore."
        )
    folder = os.path.dirname(sys.executable)
    if shutil.which("python", path=folder) is None:
        raise PlatformError(
            f"msrun starts the first 'python' on PATH, and there is none next to {sys.executable}. Run from a virtual "
            f"environment, or add a link {folder}/python."
        )


def _make_log_folder() -> Path:
    logs = Path(LOGS, f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{os.getpid()}")
    try:
        logs.mkdir(parents=True)
    except OSError as error:
        raise PlatformError(f"{logs} cannot be created: {error.strerror}. Run in a folder you can write to.") from None
    return logs


def _arguments(launch: Launch, logs: Path) -> list[str]:
    """Return msrun's arguments; cores are not bound, since another run here would be bound to the same ones."""
    return [
        *("--local_worker_num", str(launch.processes), "--worker_num", str(launch.processes * launch.nodes)),
        *("--node_rank", str(launch.node_rank), "--master_addr", launch.address, "--master_port", str(launch.port)),
        *("--cluster_time_out", str(WAIT_SECONDS), "--log_dir", str(logs), "--join=True", "--tail_worker_log=-2"),
    ]


def _environment(launch: Launch) -> dict[str, str]:
    path = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)))
    variables = {"LOCAL_WORLD_SIZE": str(launch.processes), "GLOG_v": os.environ.get("GLOG_v", "3")}  # noqa: SIM112 (3: errors only)
    return {**without_launch_variables(os.environ), **variables, "PATH": path}


def _exit_code(received: signal.Signals | None, code: int, logs: Path) -> int:
    if code == 0:
        return 0
    if received is not None:
        return 128 + received
    log_text = (logs / "msrun.log").read_text(encoding="utf-8", errors="replace")
    codes = {int(number) for number in re.findall(r"Error code: (-?\d+)", log_text)}
    if reported := [code for code in REPORTED_EXIT_CODES if code in codes]:
        return reported[0]
    why = "a worker failed" if codes or code > 0 else f"msrun was ended by {signal.Signals(-code).name}"
    logger.warning(f"{why}; all logs are in {logs}")
    return 1
