"""examples/dit/pretrain.sh, the way it is used."""

import os
import signal
import time

import pytest

from tests.faults.launched import Run, config_folder

pytestmark = [pytest.mark.ranks, pytest.mark.extended]


def test_ctrl_c_before_the_first_step_of_two_processes_leaves_no_traceback(tmp_path, few_digits):
    run = Run(tmp_path, config_folder(tmp_path / "config", few_digits), NPUS_PER_NODE="2")
    run.wait_for("10 classes")  # the ranks have yet to meet
    run.signal_all(signal.SIGINT)
    assert run.end() == 130 and "Traceback" not in run.said, run.said


def test_ctrl_c_ends_a_rank_that_waits_for_another(tmp_path, few_digits):
    run = Run(tmp_path, config_folder(tmp_path / "config", few_digits), NPUS_PER_NODE="2")
    late = run.wait_for_rank(1)
    os.kill(late, signal.SIGSTOP)
    run.wait_for("10 classes")
    time.sleep(3)  # the first rank waits in PyTorch's own code, where no handler of Python's is called
    run.signal_all(signal.SIGINT)
    os.kill(late, signal.SIGCONT)
    assert run.end() == 130 and "Traceback" not in run.said, run.said
