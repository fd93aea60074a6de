"""Run msrun so that its workers save when they receive a signal to stop, and no process outlives the run."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from types import FrameType

import psutil  # MindSpore brings it

from mindspeed_mm_dit.errors import PlatformError
from mindspeed_mm_dit.framework.exits import REPORTED_EXIT_CODES, SIGNALS, die_with_parent, without_launcher
from mindspeed_mm_dit.terminal import echo_if_open
from mindspeed_mm_dit.training.launch import WAIT_SECONDS, Launch

CPU_PROCESSES = 2
"""Processes on a node without an accelerator."""

VARIABLES = {"OMP_WAIT_POLICY": "passive"}
"""Environment variables of the processes, unless the user sets them: spinning threads slow a busy machine down."""

LOGS = "msrun_log"
"""Folder of the logs, with one folder per run."""

POLL_SECONDS = 0.2
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
    msrun = _find_msrun()
    from mindspeed_mm_dit.training.mindspore.launch import Job  # needs psutil, which MindSpore installs

    logs = _make_log_folder()
    first = launch.node_rank * launch.processes
    lines = _NewLines([logs / f"worker_{first + n}.log" for n in range(launch.processes)])
    with open(logs / "msrun.log", "w", encoding="utf-8") as log_file:
        process = subprocess.Popen(
            [msrun, *_arguments(launch, logs), *command],
            env=_environment(launch),
            stdout=log_file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(signal.SIGKILL),
        )
    job = Job(process)
    with job.noting_signals():
        while job.lives():
            time.sleep(POLL_SECONDS)
            lines.print()
    lines.print()
    return _exit_code(job.received, process.wait(), logs)


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
                    echo_if_open(line)


def _search_path() -> str:
    """Return PATH, with this interpreter's folder first if it has an msrun: mm-dit may be called by its full path."""
    folder, path = os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)
    return os.pathsep.join((folder, path)) if shutil.which("msrun", path=folder) else path


def _find_msrun() -> str:
    path = _search_path()
    msrun, python = shutil.which("msrun", path=path), shutil.which("python", path=path)
    if msrun is None:
        raise PlatformError(
            "msrun", "is not on PATH: MindSpore is not installed here", "make demo-mindspore sets it up"
        )
    if python is None or Path(python).parent != Path(msrun).parent:
        raise PlatformError(
            msrun,
            f"starts the first 'python' on PATH, {python}, which is not the one next to it",
            f"put {Path(msrun).parent} first on PATH",
        )
    return msrun


def _make_log_folder() -> Path:
    logs = Path(LOGS, f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{os.getpid()}")
    try:
        logs.mkdir(parents=True)
    except OSError as error:
        raise PlatformError(
            str(logs), f"cannot be created: {error.strerror}", "run in a folder you can write to"
        ) from None
    return logs


def _arguments(launch: Launch, logs: Path) -> list[str]:
    """Return msrun's arguments; cores are not bound, since another run here would be bound to the same ones."""
    return [
        *("--local_worker_num", str(launch.processes), "--worker_num", str(launch.processes * launch.nodes)),
        *("--node_rank", str(launch.node_rank), "--master_addr", launch.address, "--master_port", str(launch.port)),
        *("--cluster_time_out", str(WAIT_SECONDS), "--log_dir", str(logs), "--join=True", "--tail_worker_log=-2"),
    ]


def _environment(launch: Launch) -> dict[str, str]:
    variables = {"LOCAL_WORLD_SIZE": str(launch.processes), "GLOG_v": os.environ.get("GLOG_v", "3")}  # noqa: SIM112 (3: errors only)
    return {**without_launcher(os.environ), **variables, "PATH": _search_path()}


def _exit_code(received: signal.Signals | None, code: int, logs: Path) -> int:
    if code == 0:
        return 0
    if received is not None:
        return 128 + received
    log_text = (logs / "msrun.log").read_text(encoding="utf-8", errors="replace")
    codes = {int(number) for number in re.findall(r"Error code: (-?\d+)", log_text)}
    if reported := [code for code in REPORTED_EXIT_CODES if code in codes]:
        return reported[0]
    why = f"msrun was ended by {signal.Signals(-code).name}" if code < 0 else "a worker failed"
    echo_if_open(f"{why}; all logs are in {logs}", file=sys.stderr)
    return 1


AGAIN_SECONDS = 1.0
"""A signal this long after the first counts as a second one, and kills the workers at once."""

LAST_SECONDS = 10
"""How long msrun and its scheduler may live once every worker has ended."""


class Job:
    """msrun, its scheduler, and its workers on this node."""

    def __init__(self, msrun: subprocess.Popen[bytes]) -> None:
        self.received: signal.Signals | None = None
        self._received_at = 0.0
        # SIGTERM for any signal: a worker that waits for others in MindSpore would not notice a Ctrl-C.
        self._pass_on = signal.SIGTERM
        self._msrun = msrun
        self._scheduler: psutil.Process | None = None
        self._workers: list[psutil.Process] = []
        self._notified: set[psutil.Process] = set()
        self._last_worker_at = time.monotonic()

    @contextlib.contextmanager
    def noting_signals(self) -> Iterator[None]:
        """While entered, a signal to this process is recorded and passed to the workers."""
        before = {number: signal.getsignal(number) for number in SIGNALS}
        for number, handler in before.items():
            if handler != signal.SIG_IGN:  # nohup
                signal.signal(number, self._note)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self._received_at = signal.Signals(number), time.monotonic()
        elif time.monotonic() - self._received_at > AGAIN_SECONDS:
            self._pass_on = signal.SIGKILL
            self._notified.clear()

    def lives(self) -> bool:
        """Pass on a signal that arrived, and return whether msrun or a worker is still alive.

        Workers that msrun has abandoned are waited for, since they save. A scheduler without workers is killed.
        """
        self._find()
        living = [worker for worker in self._workers if _lives(worker)]
        self._notify(living)
        if living or not self._workers:
            self._last_worker_at = time.monotonic()
        msrun_lives = self._msrun.poll() is None
        if not living and (not msrun_lives or time.monotonic() - self._last_worker_at > LAST_SECONDS):
            self._end_scheduler()
        return msrun_lives or bool(living)

    def _find(self) -> None:
        """Find the processes that msrun has started since the last call."""
        known = {*self._workers, self._scheduler}
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self._msrun.pid).children():
                role = None if child in known else child.environ().get("MS_ROLE")
                if role == "MS_WORKER":
                    self._workers.append(child)
                elif role == "MS_SCHED":
                    self._scheduler = child

    def _notify(self, workers: list[psutil.Process]) -> None:
        if self.received is None:
            return
        for worker in workers:
            if worker not in self._notified:
                self._notified.add(worker)
                with contextlib.suppress(psutil.Error):
                    worker.send_signal(self._pass_on)

    def _end_scheduler(self) -> None:
        if self._scheduler is not None and _lives(self._scheduler):
            with contextlib.suppress(psutil.Error):
                self._scheduler.kill()


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
