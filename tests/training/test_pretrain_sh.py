"""examples/dit/pretrain.sh, the way it is used."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.faults.launched import Run, config_folder
from tests.forked import PATIENCE_SECONDS

pytestmark = pytest.mark.ranks


def pretrain(folder: Path, flags: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", str(ROOT / "examples/dit/pretrain.sh"), *flags.split()], cwd=folder, text=True,
        timeout=PATIENCE_SECONDS, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "VIRTUAL_ENV": "this one",
             "CUDA_VISIBLE_DEVICES": "", **environment},
    )  # fmt: skip


def test_two_sharded_processes_train_and_say_nothing_else(tmp_path):
    run = pretrain(tmp_path, "--use-torch-fsdp2 --train-iters 2 --log-interval 1", NPUS_PER_NODE="2")
    assert run.returncode == 0, run.stdout
    assert "2 rank(s)" in run.stdout and "iteration        2/       2" in run.stdout
    assert "Warning" not in run.stdout and "nothing is drawn: it would take longer" in run.stdout


def test_a_mistake_in_two_processes_is_one_line_and_no_traceback(tmp_path):
    run = pretrain(tmp_path, "--train-iters 0", NPUS_PER_NODE="2")
    assert run.returncode == 2 and run.stdout.count("ConfigError") == 1
    assert "Traceback" not in run.stdout and len(run.stdout.splitlines()) < 6


@pytest.mark.extended
def test_ctrl_c_before_the_first_step_of_two_processes_leaves_no_traceback(tmp_path, few_digits):
    run = Run(tmp_path, config_folder(tmp_path / "config", few_digits), NPUS_PER_NODE="2")
    run.wait_for("10 classes")  # the ranks have yet to meet
    run.signal_all(signal.SIGINT)
    assert run.end() == 130 and "Traceback" not in run.said, run.said


@pytest.mark.extended
def test_ctrl_c_ends_a_rank_that_waits_for_another(tmp_path, few_digits):
    run = Run(tmp_path, config_folder(tmp_path / "config", few_digits), NPUS_PER_NODE="2")
    late = run.wait_for_rank(1)
    os.kill(late, signal.SIGSTOP)
    run.wait_for("10 classes")
    time.sleep(3)  # the first rank waits in PyTorch's own code, where no handler of Python's is called
    run.signal_all(signal.SIGINT)
    os.kill(late, signal.SIGCONT)
    assert run.end() == 130 and "Traceback" not in run.said, run.said
