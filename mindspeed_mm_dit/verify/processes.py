"""The two sides of a comparison, each a framework in an interpreter of its own, run as a user runs them."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from mindspeed_mm_dit.configs.train_args import read_train_args
from mindspeed_mm_dit.errors import ConfigError, PlatformError, UserError
from mindspeed_mm_dit.framework.launched import without_launcher
from mindspeed_mm_dit.training.read_logs import parse_losses, parse_milliseconds
from mindspeed_mm_dit.verify.worker import Job

ROOT = Path(__file__).resolve().parents[2]
"""Folder of the package and of pretrain_dit.py."""
PACKAGES = {"pytorch": "torch", "mindspore": "mindspore"}
VENVS = {"pytorch": ".venv", "mindspore": ".venv-mindspore"}

LEFT_OUT = (
    "--save", "--load", "--init-from", "--tensorboard-dir", "--save-interval", "--eval-interval",
    "--eval-iters", "--log-interval", "--ai-framework", "--host", "--fsdp2-config-path", "--seed", "--mm-model",
    "--mm-data", "--mm-tool", "--report", "--use-torch-fsdp2", "--no-async-save", "--bf16",
)  # fmt: skip
"""Flags that compare decides itself, and those of what a short run from fixed weights must not do."""


@dataclass(frozen=True)
class Side:
    """One framework, and where it lives."""

    label: str
    """What the report calls it."""
    framework: str
    """"pytorch" or "mindspore"."""
    python: str
    """Interpreter that has it."""
    root: Path = ROOT
    """Folder that holds the package and pretrain_dit.py to run."""

    def measure(self, jobs: Sequence[Job], folder: Path) -> None:
        """Run the worker on ``jobs``, one after the other in one process."""
        paths = [folder / f"{self.label}_job{number}.json" for number in range(len(jobs))]
        for job, path in zip(jobs, paths):
            path.write_text(json.dumps(asdict(job)), encoding="utf-8")
        self._run_main("mindspeed_mm_dit.verify.worker", [str(path) for path in paths], folder)

    def train(self, flags: Sequence[str], folder: Path) -> Training:
        """Run pretrain_dit.py with ``flags`` and read its log."""
        script = self.root / "pretrain_dit.py"
        if not script.is_file():
            raise PlatformError(str(script), "is not there", "install the project with pip install --editable")
        own = ["--host", "standalone", "--ai-framework", self.framework]
        lines = self._run([str(script), *own, *flags], folder).splitlines()
        return Training(parse_losses(lines), parse_milliseconds(lines))

    def sample(self, flags: Sequence[str], folder: Path) -> np.ndarray:
        """Run ``mm-dit sample`` with ``flags``; return images (N, H, W, C) uint8."""
        output = folder / f"{self.label}_samples.npz"
        own = ["--ai-framework", self.framework, "--output", str(output)]
        self._run_main("mindspeed_mm_dit.cli.main", ["sample", *flags, *own], folder)
        with np.load(output) as file:
            return np.asarray(file["arr_0"])

    def _run_main(self, module: str, arguments: Sequence[str], folder: Path) -> None:
        """Run ``main`` of a module of this side's copy of the package (-m would take the working directory's)."""
        code = f"import sys; sys.path[0] = {str(self.root)!r}; from {module} import main; sys.exit(main(sys.argv[1:]))"
        self._run(["-c", code, *arguments], folder)

    def _run(self, arguments: Sequence[str], folder: Path) -> str:
        """Run this side's interpreter to the end; return its standard output.

        Raises UserError with the last words of a process that failed; all it said is kept in ``folder``.
        """
        own, others = str(self.root), os.environ.get("PYTHONPATH")  # (where plugins may be)
        path = os.pathsep.join([own, others] if others else [own])
        environment = {**without_launcher(os.environ), "PYTHONPATH": path}
        done = subprocess.run(
            [self.python, *arguments], env=environment, text=True, stdin=subprocess.DEVNULL, capture_output=True
        )
        if done.returncode != 0:
            log = folder / f"{self.label}_failed.log"
            log.write_text(f"{shlex.join([self.python, *arguments])}\n{done.stdout}\n{done.stderr}", encoding="utf-8")
            raise UserError(f"{self.label} ({self.python})", last_words(done), f"all it said is in {log}")
        return done.stdout


@dataclass(frozen=True)
class Training:
    """What a training run printed."""

    losses: dict[int, float]
    """Loss by step."""
    milliseconds: dict[int, float]
    """Time of a step, in ms."""

    def images_per_second(self, batch_size: int) -> float:
        """Return the median speed over the second half of the steps: the first ones compile and warm up."""
        times = list(self.milliseconds.values())
        return batch_size * 1000 / statistics.median(times[len(times) // 2 :])


def find_sides(pytorch_python: str | None, mindspore_python: str | None) -> tuple[Side, Side]:
    """Return the PyTorch side and the MindSpore side.

    An interpreter is the flag's, else this one if it has the framework, else the one of .venv or .venv-mindspore in
    the working directory. Raises PlatformError if none of them has it.
    """
    return (
        Side("pytorch", "pytorch", find_python("pytorch", pytorch_python)),
        Side("mindspore", "mindspore", find_python("mindspore", mindspore_python)),
    )


def interpreters(mindspore_python: str | None) -> dict[str, str | UserError]:
    """Return an interpreter of each framework, or why there is none."""
    found: dict[str, str | UserError] = {}
    for framework, given in (("pytorch", None), ("mindspore", mindspore_python)):
        try:
            found[framework] = find_python(framework, given)
        except PlatformError as error:
            found[framework] = error
    return found


def find_python(framework: str, given: str | None) -> str:
    """Return an interpreter that has ``framework``; raises PlatformError if there is none."""
    flag, package = f"--{framework}-python", PACKAGES[framework]
    if given is not None:
        if not _has(given, package):
            raise PlatformError(f"{flag} = {given}", f"cannot run, or has no package {package!r}",
                                "name the python of an environment with it")  # fmt: skip
        return given
    if importlib.util.find_spec(package) is not None:
        return sys.executable
    sibling = Path(VENVS[framework]).absolute() / "bin" / "python"
    if sibling.exists() and _has(str(sibling), package):
        return str(sibling)
    raise PlatformError(
        flag, f"neither {sys.executable} nor {sibling} has {package}", f"pass {flag} PYTHON, an interpreter with it"
    )


def training_flags(
    model: str, data: str, train_args: Path, steps: int, seed: int, batch_size: int | None, start: Path | None
) -> list[str]:
    """Return the flags of pretrain_dit.py, equal on both sides: those of ``train_args``, for ``steps`` steps.

    The learning rate follows the schedule of the whole run, of which these are the first steps.
    """
    given = own_flags(train_args) if train_args.is_file() else ["--lr", "1e-4", "--micro-batch-size", "16"]
    if "--lr-decay-iters" not in given and "--train-iters" in given:
        given += ["--lr-decay-iters", given[given.index("--train-iters") + 1]]
    flags = ["--mm-model", model, "--mm-data", data, *given, "--train-iters", str(steps), "--log-interval", "1"]
    flags += ["--seed", str(seed)]
    if batch_size is not None:
        flags += ["--micro-batch-size", str(batch_size), "--global-batch-size", str(batch_size)]
    if start is not None:
        flags += ["--init-from", str(start)]
    return flags


def batch_size_of(flags: Sequence[str]) -> int:
    """Return the global batch size that ``flags`` set on one rank."""
    for name in ("--global-batch-size", "--micro-batch-size"):
        if name in flags:
            return int(flags[len(flags) - 1 - list(reversed(flags)).index(name) + 1])
    raise ConfigError("train.args", "has neither --micro-batch-size nor --global-batch-size", "pass --batch-size")


def own_flags(path: Path, left_out: Collection[str] = LEFT_OUT) -> list[str]:
    """Return the flags of a train.args without those that are decided here, and their values."""
    words = [part for word in read_train_args(path, "--train-args") for part in word.split("=", 1)]
    kept, is_kept = list[str](), True
    for word in words:
        is_kept = word not in left_out if word.startswith("--") else is_kept
        kept += [word] if is_kept else []
    return kept


def _has(python: str, package: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    try:
        return subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def last_words(done: subprocess.CompletedProcess[str]) -> str:
    """Return the reason a process gave: the error it ended with, else its last line."""
    lines = [line.strip() for line in (done.stdout + "\n" + done.stderr).splitlines() if line.strip()]
    named = [line for line in lines if "Error: " in line]
    return f"exit code {done.returncode}: {(named or lines or ['it said nothing'])[-1]}"
