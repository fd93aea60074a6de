"""One rank's disk fails, or one rank's file changes: every rank draws the same conclusion and goes on."""

import errno
import os
import re
from pathlib import Path

import pytest

from mindspeed_mm_dit.checkpoint.store import CheckpointStore
from tests.conftest import ROOT
from tests.mindspore import launch as mindspore
from tests.training.launch import Configs, Outcome

pytestmark = pytest.mark.ranks

FLAGS = "--global-batch-size 32 --lr 1e-3 --save {0} --load {0} "
FAILING_DISK = str(Path(__file__).parent / "failing_disk")
AUTO = "sharding_size: auto\nsub_modules_to_wrap: ['predictor.blocks.{*}']\n"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, few_digits):
    configs = Configs.create(tmp_path_factory.mktemp("tiny"), few_digits, hidden_size=32, num_layers=1, num_heads=2)
    (configs.folder / "auto.yaml").write_text(AUTO)
    return configs


def full_for(pattern: str, **how: str) -> dict[str, str]:
    """Return the environment in which no file whose path matches can be written: its disk is full."""
    return {"FULL_FOR": pattern, "PYTHONPATH": f"{FAILING_DISK}{os.pathsep}{ROOT}", **how}


def check_failed_save(outcome: Outcome, root: Path, number: int = errno.ENOSPC) -> None:
    """The save of iteration 2 failed, was said once and before the next one, and cost nothing but itself."""
    assert outcome.code == 0, outcome.output
    said = re.findall(rf"iteration +(\d+)/|could not be written: OSError: \[Errno {number}\]", outcome.output)
    assert said.count("") == 1 and said.index("") < said.index("6"), said
    assert CheckpointStore(root).iterations() == [4, 6]
    assert not list(root.glob(".iter_*.partial")) and not (root / ".claim").exists()


def check_fallback(outcome: Outcome, file: str) -> None:
    assert outcome.code == 0, outcome.output
    assert outcome.output.count("iter_0000006 is damaged") == 1
    assert f"({file} does not match its checksum" in outcome.output
    assert list(outcome.losses) == [5]


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_two_ranks_of_pytorch_agree_that_a_save_failed_and_that_a_file_changed(tiny, tmp_path):
    """Sharded until step 6, where the second rank cannot write its part of step 2; then replicated."""
    flags = FLAGS.format(tmp_path) + "--micro-batch-size 16 "
    sharded = flags + "--train-iters 6 --save-interval 2 --use-torch-fsdp2 --fsdp2-config-path auto.yaml"
    check_failed_save(tiny.run(sharded, 2, **full_for(r"0002\.partial/__1_")), tmp_path)
    flip_a_bit(tmp_path / "iter_0000006" / "__1_0.distcp")
    check_fallback(tiny.run(flags + "--train-iters 5", 2), "__1_0.distcp")


@pytest.mark.extended
@mindspore.needs_mindspore
def test_workers_of_mindspore_agree_that_a_save_failed_and_that_a_file_changed(tiny, tmp_path):
    """Two workers until step 6, of which the first cannot write step 2; then one."""
    flags = FLAGS.format(tmp_path) + "--pynative --train-iters {} --micro-batch-size {} "
    failing = full_for(r"0002\.partial/state\.ckpt")
    check_failed_save(mindspore.run(tiny, flags.format(6, 16) + "--save-interval 2", 2, **failing), tmp_path)
    flip_a_bit(tmp_path / "iter_0000006" / "state.ckpt")
    check_fallback(mindspore.run(tiny, flags.format(5, 32)), "state.ckpt")


HOW = [{"FULL_AS": name} | after for name in ("ENOSPC", "EROFS") for after in ({}, {"FULL_AFTER": "30"})]


@pytest.mark.campaign
@pytest.mark.parametrize("how", HOW, ids=lambda how: " ".join(how.values()))
@pytest.mark.parametrize("file", ["__0_0.distcp", "__1_0.distcp", ".metadata", "run.json", "checksums.json"])
def test_a_disk_that_fails_in_any_file_of_a_save_of_two_ranks_costs_that_save(tiny, tmp_path, file, how):
    flags = FLAGS.format(tmp_path) + "--micro-batch-size 16 --train-iters 6 --save-interval 2 --use-torch-fsdp2"
    failing = full_for(rf"0002\.partial/\.?{re.escape(file)}", **how)
    outcome = tiny.run(f"{flags} --fsdp2-config-path auto.yaml", 2, **failing)
    check_failed_save(outcome, tmp_path, getattr(errno, how["FULL_AS"]))


@pytest.mark.campaign
@pytest.mark.parametrize("how", [HOW[0], HOW[2]], ids=lambda how: " ".join(how.values()))
def test_a_tracker_that_cannot_be_written_costs_no_checkpoint(tiny, tmp_path, how):
    """The checkpoint is there already, under its name; the next save moves the tracker."""
    failing = full_for(r"latest_checkpointed_iteration", **how)
    flags = FLAGS.format(tmp_path) + "--micro-batch-size 16 --train-iters 6 --save-interval 2"
    outcome = tiny.run(flags, 2, **failing)
    assert outcome.code and "could not be written" in outcome.output and "Traceback" not in outcome.output
    assert CheckpointStore(tmp_path).iterations()[-1] == 6
    resumed = tiny.run(flags.replace("--train-iters 6", "--train-iters 7"))
    assert list(resumed.losses) == [7] and (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "7"
