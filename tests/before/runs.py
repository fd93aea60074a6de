"""Run pretrain_dit.py with flags alone, in a folder where their relative paths start."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.forked import STARTED, Forked, launch
from tests.training.launch import PATIENCE_SECONDS, Outcome

PYTHON = os.environ.get("MM_DIT_MINDSPORE_PYTHON", "")
SCRIPT = (str(ROOT / "pretrain_dit.py"), "--host", "standalone")
needs_mindspore = pytest.mark.skipif(not Path(PYTHON).is_file(), reason="MM_DIT_MINDSPORE_PYTHON names no interpreter")


def run(place: Path, flags: str) -> Outcome:
    """Run on PyTorch, in a process that has PyTorch imported already."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return _ended(launch([sys.executable, *SCRIPT, *flags.split()], environment, str(place)))


def run_on_mindspore(place: Path, flags: str) -> Outcome:
    """Run on MindSpore, in a process that has MindSpore imported already."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOG_v": "3"}
    command = [PYTHON, *SCRIPT, "--ai-framework", "mindspore", *flags.split()]
    return _ended(Forked(command, environment, str(place), "mindspore"))


def _ended(process: Any) -> Outcome:
    STARTED.append(process)
    output = process.communicate(timeout=PATIENCE_SECONDS)[0]
    return Outcome(process.returncode, output)
