"""What every command does alike."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mindspeed_mm_dit.cli import plot
from mindspeed_mm_dit.cli.main import main
from tests.conftest import ROOT


def test_ctrl_c_says_one_line_and_returns_130(monkeypatch, capfd):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(plot, "run", interrupted)
    assert main(["plot", "x.log"]) == 130
    assert capfd.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("rank", ["0", "1"])
def test_ctrl_c_before_training_begins_says_one_line_on_the_first_rank(rank):
    code = (
        "import os, signal, sys\n"
        "from mindspeed_mm_dit.training import host\n"
        "host.find_host = lambda argv: os.kill(os.getpid(), signal.SIGINT)\n"
        "host.choose_host([])"
    )
    environment = {"PYTHONPATH": str(ROOT), "RANK": rank}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "interrupted\n" if rank == "0" else "")
