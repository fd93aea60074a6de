"""Interpreters of both frameworks, and the processes that ``mm-dit prove`` and ``compare`` start with them."""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from mindspeed_mm_dit.configs.arguments import read_train_args
from mindspeed_mm_dit.errors import ConfigError, PlatformError, UserError
from mindspeed_mm_dit.framework.exits import without_launcher
from mindspeed_mm_dit.tools.verify.task import Task, write_tasks

ROOT = Path(__file__).resolve().parents[3]
"""Folder of the package and of pretrain_dit.py."""
OURS, HOSTED = (Path(__file__).with_name(name) for name in ("prove_worker.py", "prove_hosted.py"))
"""Scripts that the processes run."""
PACKAGES = {"pytorch": "torch", "mindspore": "mindspore"}
VENVS = {"pytorch": ".venv", "mindspore": ".venv-mindspore"}
Pythons = Mapping[str, "str | UserError"]
"""Framework -> its interpreter, or why there is none; host that is not installed -> the reason."""
_START = "import sys; from mindspeed_mm_dit.training.launch import start; sys.exit(start(sys.argv[1], sys.argv[2:]))"

LEFT_OUT = (
    "--save", "--load", "--init-from", "--tensorboard-dir", "--save-interval", "--eval-interval",
    "--eval-iters", "--log-interval", "--ai-framework", "--host", "--fsdp2-config-path", "--seed", "--mm-model",
    "--mm-data", "--mm-tool", "--report", "--use-torch-fsdp2", "--no-async-save", "--bf16",
)  # fmt: skip
"""Flags that are decided here, and flags for things that a short run from fixed weights must not do."""


def run_tasks(
    ranks: int, framework: str, tasks: Sequence[Task], folder: Path, pythons: Pythons, script: Path = OURS
) -> str:
    """Do ``tasks`` in ``ranks`` processes, started by the launcher of a run; return why they ended early, if they did.

    Their output goes to ``folder``, in a .log named after the first task.
    """
    python = pythons[framework]
    if isinstance(python, UserError):
        return str(python)
    listed = folder / f"{Path(tasks[0].output).name}.json"
    write_tasks(listed, tasks)
    path = os.pathsep.join([os.path.dirname(python), os.environ.get("PATH", "")])
    done = run_python(python, ["-c", _START, framework, str(script), str(listed)], listed.with_suffix(".log"),
                      NPUS_PER_NODE=str(ranks), PATH=path)  # fmt: skip
    return last_words(done) if done.returncode else "its process ended without output"


def run_python(python: str, arguments: Sequence[str], log: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run an interpreter with this copy of the package on its path, and write its output to ``log``."""
    roots = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]  # (where plugins may be)
    environment = {**without_launcher(os.environ), "PYTHONPATH": os.pathsep.join(roots), **variables}
    done = subprocess.run(
        [python, *arguments], env=environment, text=True, stdin=subprocess.DEVNULL, capture_output=True
    )
    log.write_text(f"{shlex.join([python, *arguments])}\n{done.stdout}\n{done.stderr}", encoding="utf-8")
    return done


def interpreters(pytorch_python: str | None, mindspore_python: str | None) -> dict[str, str | UserError]:
    """Return an interpreter of each framework, or why there is none."""
    pythons: dict[str, str | UserError] = {}
    for framework, requested in (("pytorch", pytorch_python), ("mindspore", mindspore_python)):
        try:
            pythons[framework] = find_python(framework, requested)
        except PlatformError as error:
            pythons[framework] = error
    return pythons


def find_python(framework: str, requested: str | None) -> str:
    """Return an interpreter that has ``framework``; raises PlatformError if there is none.

    That is the requested one, or else this one, or else the one of .venv or .venv-mindspore in the working directory.
    """
    flag, package = f"--{framework}-python", PACKAGES[framework]
    if requested is not None:
        if not _has(requested, package):
            raise PlatformError(f"{flag} = {requested}", f"cannot run, or has no package {package!r}",
                                "name the python of an environment with it")  # fmt: skip
        return requested
    if importlib.util.find_spec(package) is not None:
        return sys.executable
    sibling = Path(VENVS[framework]).absolute() / "bin" / "python"
    if sibling.exists() and _has(str(sibling), package):
        return str(sibling)
    raise PlatformError(
        flag, f"neither {sys.executable} nor {sibling} has {package}", f"pass {flag} PYTHON, an interpreter with it"
    )


def project_flags(path: Path, left_out: Collection[str] = LEFT_OUT) -> list[str]:
    """Return the flags of a train.args, except those that are decided here, with their values."""
    words = [part for word in read_train_args(path, "--train-args") for part in word.split("=", 1)]
    included, is_included = list[str](), True
    for word in words:
        is_included = word not in left_out if word.startswith("--") else is_included
        included += [word] if is_included else []
    return included


def batch_size_of(flags: Sequence[str]) -> int:
    """Return the global batch size that ``flags`` set on one rank."""
    for name in ("--global-batch-size", "--micro-batch-size"):
        if name in flags:
            return int(flags[len(flags) - 1 - list(reversed(flags)).index(name) + 1])
    raise ConfigError("train.args", "has neither --micro-batch-size nor --global-batch-size", "pass --batch-size")


def last_words(done: subprocess.CompletedProcess[str]) -> str:
    """Return the reason a process gave: the error it ended with, or else its last line."""
    lines = [line.strip() for line in (done.stdout + "\n" + done.stderr).splitlines() if line.strip()]
    named = [line for line in lines if "Error: " in line]
    return f"exit code {done.returncode}: {(named or lines or ['no output'])[-1]}"


def _has(python: str, package: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    try:
        return subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0
    except OSError:
        return False
