"""Run pretrain_dit.py with flags alone, in a folder where their relative paths start."""

import sys
from pathlib import Path

from tests.conftest import ROOT
from tests.mindspore import launch as mindspore
from tests.training import launch
from tests.training.launch import Outcome

SCRIPT = [str(ROOT / "pretrain_dit.py"), "--host", "standalone"]


def run(place: Path, flags: str) -> Outcome:
    """Run on PyTorch."""
    return launch.run([sys.executable, *SCRIPT, *flags.split()], place)


def run_on_mindspore(place: Path, flags: str) -> Outcome:
    """Run on MindSpore."""
    return mindspore.run_script([*SCRIPT, "--ai-framework", "mindspore", *flags.split()], place)
