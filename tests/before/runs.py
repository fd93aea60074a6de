"""Run pretrain_dit.py with flags alone, in a folder where their relative paths start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.forked import STARTED, launch
from tests.training.launch import PATIENCE_SECONDS, Outcome

PYTHON = os.environ.get("MM_DIT_MINDSPORE_PYTHON", "")
needs_mindspore = pytest.mark.skipif(not Path(PYTHON).is_file(), reason="MM_DIT_MINDSPORE_PYTHON names no interpreter")


def run(place: Path, flags: str) -> Outcome:
    """Run on PyTorch, in a process that has PyTorch imported already."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(ROOT / "pretrain_dit.py"), "--host", "standalone", *flags.split()]
    process = launch(command, environment, str(place))
    STARTED.append(process)
    output = process.communicate(timeout=PATIENCE_SECONDS)[0]
    return Outcome(process.returncode, output)


def run_on_mindspore(place: Path, flags: str) -> Outcome:
    """Run on MindSpore, in a process of its own: MindSpore has threads once it is imported."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOG_v": "3"}
    command = [PYTHON, str(ROOT / "pretrain_dit.py"), "--host", "standalone", "--ai-framework", "mindspore"]
    done = subprocess.run([*command, *flags.split()], env=environment, cwd=place, text=True, timeout=PATIENCE_SECONDS,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    return Outcome(done.returncode, done.stdout)
