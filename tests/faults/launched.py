"""Runs started by examples/dit/pretrain.sh as a user starts them, and what is left of them."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from mindspeed_mm_dit.framework.exits import die_with_parent
from mindspeed_mm_dit.training.launch import free_port
from tests.conftest import ROOT
from tests.forked import PATIENCE_SECONDS, STARTED
from tests.training.launch import Configs, place_of

MINDSPORE_PYTHON = os.environ.get("MM_DIT_MINDSPORE_PYTHON", "")
MARK = "MM_DIT_TEST_RUN"
FLAGS = """
--train-iters 100000
--global-batch-size 4
--lr 1e-3
--log-interval 1
--num-workers 1
--save checkpoints   # relative to the working directory
--load checkpoints
"""


def config_folder(folder: Path, digits: Path) -> Path:
    """Write the configs of a tiny model that trains until it is stopped."""
    Configs.create(folder, digits, hidden_size=32, num_layers=1, num_heads=2)
    (folder / "train.args").write_text(FLAGS)
    (folder / "fsdp2.yaml").write_text("sharding_size: auto\n")
    return folder


class Watched:
    """A run whose output is read while it is under way."""

    def wait_for(self, pattern: str) -> None:
        wait_until(lambda: re.search(pattern, self.said) or self.is_over())
        assert re.search(pattern, self.said), self.said


class Run(Watched):
    """pretrain.sh under way in ``folder``; all its processes carry a mark in their environment."""

    def __init__(self, folder: Path, config: Path, flags: str = "", framework: str = "pytorch", **variables: str):
        self.folder, self.framework, self.mark = folder, framework, uuid.uuid4().hex
        self.log = folder / f"{self.mark}.log"
        python = MINDSPORE_PYTHON if framework == "mindspore" else sys.executable
        environment = {**{name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"},
                       "PATH": f"{Path(python).parent}:{os.environ['PATH']}", "VIRTUAL_ENV": "this one",
                       "CUDA_VISIBLE_DEVICES": "", "AI_FRAMEWORK": framework, "CONFIG": str(config), MARK: self.mark,
                       **variables}  # fmt: skip
        self.process = subprocess.Popen(
            ["bash", str(ROOT / "examples/dit/pretrain.sh"), *flags.split()], cwd=folder, env=environment,
            stdin=subprocess.DEVNULL, stdout=self.log.open("w"), stderr=subprocess.STDOUT, start_new_session=True,
            preexec_fn=lambda: die_with_parent(signal.SIGTERM),  # tests that are killed leave no rank
        )  # fmt: skip
        STARTED.append(self)

    def poll(self) -> int | None:
        return None if self.processes() else 0

    def kill(self, *_: object) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def is_over(self) -> bool:
        return self.process.poll() is not None

    def processes(self, containing: str = "") -> list[int]:
        """Return those of its processes that live and whose command line contains a word."""
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            try:
                is_ours = f"{MARK}={self.mark}".encode() in (place / "environ").read_bytes()
                words = (place / "cmdline").read_bytes()  # empty: it has ended, and waits to be noticed
            except OSError:
                continue
            if is_ours and words and containing.encode() in words:
                found.append(int(place.name))
        return found

    def wait_for_rank(self, number: int) -> int:
        """Wait until a rank of torchrun has come as far as PyTorch, and return its process."""
        wait_until(lambda: self.rank(number) or self.is_over())
        process = self.rank(number)
        assert process is not None, self.said
        return process

    def rank(self, number: int) -> int | None:
        """Return the process of one rank of torchrun once it has come as far as PyTorch, None before."""
        for pid in self.processes("pretrain_dit.py"):
            with contextlib.suppress(OSError):  # it has just ended
                is_it = f"\0LOCAL_RANK={number}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes()
                if is_it and "libtorch" in Path(f"/proc/{pid}/maps").read_text():
                    return pid
        return None

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal as a terminal does: to the whole foreground."""
        os.killpg(self.process.pid, number)

    def end(self) -> int:
        try:
            code = self.process.wait(PATIENCE_SECONDS)
            wait_until(lambda: not self.processes())
        finally:
            self.kill()
        return code


class Ranks(Watched):
    """The ranks of a run on PyTorch, each a fork of a process that has made the imports; no launcher is above them."""

    framework = "pytorch"

    def __init__(self, folder: Path, config: Path, count: int, flags: str):
        self.folder, port, saved = folder, str(free_port()), folder / "checkpoints"
        flags += f" --global-batch-size 4 --micro-batch-size {4 // count} --lr 1e-3 --log-interval 1"
        flags += f" --save {saved} --load {saved}"
        self.processes = [Configs(config).start(flags, **place_of(rank, count, port)) for rank in range(count)]
        self.lines: list[str] = []
        self._readers = [threading.Thread(target=self._read, args=(process,)) for process in self.processes]
        for reader in self._readers:
            reader.start()

    def _read(self, process: Any) -> None:
        self.lines.extend(process.stdout)

    @property
    def said(self) -> str:
        return "".join(self.lines)

    def is_over(self) -> bool:
        return any(process.poll() is not None for process in self.processes)

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to each rank, as a launcher does that was sent it."""
        for process in self.processes:
            process.send_signal(number)

    def end(self) -> int:
        codes = [self._code(process) for process in self.processes]
        for reader in self._readers:
            reader.join(PATIENCE_SECONDS)
        return next((code for code in codes if code), 0)

    def _code(self, process: Any) -> int:
        return int(process.wait(PATIENCE_SECONDS))


def wait_until(until) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not until():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.1)
