"""Parts of a run from outside the package: nothing of it is edited, an installed package is enough."""

import os
import re
import signal
import time

import pytest

from tests.external.plugin import install
from tests.faults.launched import Run, config_folder
from tests.training.launch import mm_dit

pytestmark = pytest.mark.ranks
FLAGS = "--train-iters 6 --global-batch-size 16 --num-workers 0 --eval-interval 1 --eval-iters 1 "
UNMOVED = "--lr 1e-30 --weight-decay 0 "


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return install(tmp_path_factory.mktemp("installed"), "tests.external.plugin:register_parts_of_runs")


def test_a_tracker_keeps_what_is_printed_and_a_watcher_ends_the_run_on_all_ranks(validated, path, tmp_path):
    """The weights do not move, so that no validation finds a smaller loss than the first."""
    outcome = validated.done(FLAGS + UNMOVED + f"--patience 2 --csv-folder {tmp_path}", ranks=2, PYTHONPATH=path)
    assert "no smaller validation loss for 2 validation(s) at iteration 3: nothing is saved" in outcome.output
    kept = [line.split(",") for line in (tmp_path / "values.csv").read_text().splitlines()]
    losses = {int(step): float(value) for step, name, value in kept if name == "train/loss"}
    assert outcome.losses == pytest.approx(losses, rel=1e-6) and list(losses) == [1, 2, 3]
    assert [step for step, name, _ in kept if name == "valid/loss"] == ["1", "2", "3"]


def test_a_host_takes_the_first_step_of_ours(validated, path):
    flags = "--train-iters 1 --global-batch-size 16 --num-workers 0 --lr 1e-2"
    ours, theirs = validated.run(flags), validated.run(f"{flags} --host one-step", PYTHONPATH=path)
    assert theirs.code == 0, theirs.output
    assert re.findall(r"one step, from loss (\S+)", theirs.output) == [f"{ours.losses[1]:.6E}"]


def test_flags_that_a_part_cannot_act_on_are_refused_before_any_work(validated, path):
    outcome = validated.run("--train-iters 6 --global-batch-size 16 --lr 1 --patience 2", PYTHONPATH=path)
    assert outcome.code == 2 and "--patience = 2" in outcome.output


def test_a_command_is_listed_and_run(path, tmp_path):
    (tmp_path / "a file").touch()
    assert "count the files of a folder" in mm_dit(PYTHONPATH=path).output
    assert mm_dit("count", tmp_path, PYTHONPATH=path).output == "1\n"


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
