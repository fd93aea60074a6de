"""Run pretrain_dit.py several times, each in a process forked from one that has imported PyTorch.

Most of a start is that import.

    python -m tests.before.together < {"NAME": ["--flag", ...], ...}

leaves what each printed in NAME.log in the working directory, and its exit code in the last line.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.training.launch import Outcome

PYTHON = os.environ.get("MM_DIT_MINDSPORE_PYTHON", "")
needs_mindspore = pytest.mark.skipif(not Path(PYTHON).is_file(), reason="MM_DIT_MINDSPORE_PYTHON names no interpreter")


def run_together(place: Path, runs: dict[str, str]) -> dict[str, Outcome]:
    """Run pretrain_dit.py with the flags of each of ``runs``, in ``place``; return what came of each."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.before.together"]
    subprocess.run(command, input=json.dumps(runs), env=environment, cwd=place, text=True, check=True, timeout=1200)
    logs = {name: (place / f"{name}.log").read_text() for name in runs}
    return {name: Outcome(int(log.splitlines()[-1]), log) for name, log in logs.items()}


def run_on_mindspore(place: Path, flags: str) -> Outcome:
    """Run pretrain_dit.py on MindSpore, in ``place``: a process of its own, for MindSpore has threads once imported."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOG_v": "3"}
    command = [PYTHON, str(ROOT / "pretrain_dit.py"), "--host", "standalone", "--ai-framework", "mindspore"]
    done = subprocess.run([*command, *flags.split()], env=environment, cwd=place, text=True, timeout=300,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    return Outcome(done.returncode, done.stdout)


def _run(name: str, flags: str) -> None:
    log = os.open(f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    script = str(ROOT / "pretrain_dit.py")
    sys.argv = [script, "--host", "standalone", *flags.split()]
    runpy.run_path(script, run_name="__main__")


def main() -> None:
    """Read the runs from stdin, and run one after the other."""
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.tensor  # noqa: F401

    for name, flags in json.load(sys.stdin).items():
        child = os.fork()
        if child == 0:
            return _run(name, flags)
        _, status = os.waitpid(child, 0)
        with open(f"{name}.log", "a") as log:
            log.write(f"\n{os.waitstatus_to_exitcode(status)}\n")


if __name__ == "__main__":
    main()
