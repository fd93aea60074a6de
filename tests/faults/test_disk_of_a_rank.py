"""One rank's disk fails, or one rank's file changes: every rank draws the same conclusion and goes on."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from mindspeed_mm_dit.checkpoint.store import CheckpointStore
from tests.conftest import ROOT
from tests.mindspore import test_mindspore_run as mindspore
from tests.training.launch import Configs, Outcome

pytestmark = pytest.mark.ranks

FLAGS = "--global-batch-size 32 --lr 1e-3 --save {0} --load {0} "
FAILING_DISK = str(Path(__file__).parent / "failing_disk")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, digits_folder):
    return Configs.create(tmp_path_factory.mktemp("tiny"), digits_folder, hidden_size=32, num_layers=2, num_heads=2)


def full_for(pattern: str) -> dict[str, str]:
    """Return the environment in which no file whose path matches can be written: its disk is full."""
    return {"FULL_FOR": pattern, "PYTHONPATH": f"{FAILING_DISK}{os.pathsep}{ROOT}"}


def check_failed_save(outcome: Outcome, root: Path) -> None:
    """The save of iteration 2 failed, was said once and before the next one, and cost nothing but itself."""
    assert outcome.code == 0, outcome.output
    said = re.findall(r"iteration +(\d+)/|could not be written: OSError: \[Errno 28\]", outcome.output)
    assert said.count("") == 1 and said.index("") < said.index("6"), said
    assert CheckpointStore(root).iterations() == [4, 6]
    assert not list(root.glob(".iter_*.partial")) and not (root / ".claim").exists()


def check_fallback(outcome: Outcome, file: str) -> None:
    assert outcome.code == 0, outcome.output
    assert outcome.output.count("iter_0000006 is damaged") == 1 and f"({file} is not what was written" in outcome.output
    assert list(outcome.losses) == [5]


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_two_ranks_of_pytorch_agree_that_a_save_failed_and_that_a_file_changed(tiny, tmp_path):
    """Sharded until step 6, where the second rank cannot write its part of step 2; then replicated."""
    (tiny.folder / "auto.yaml").write_text("sharding_size: auto\nsub_modules_to_wrap: ['predictor.blocks.{*}']\n")
    flags = FLAGS.format(tmp_path) + "--micro-batch-size 16 "
    sharded = flags + "--train-iters 6 --save-interval 2 --use-torch-fsdp2 --fsdp2-config-path auto.yaml"
    check_failed_save(tiny.run(sharded, 2, **full_for(r"0002\.partial/__1_")), tmp_path)
    flip_a_bit(tmp_path / "iter_0000006" / "__1_0.distcp")
    check_fallback(tiny.run(flags + "--train-iters 5", 2), "__1_0.distcp")


@mindspore.pytestmark[1]
def test_workers_of_mindspore_agree_that_a_save_failed_and_that_a_file_changed(tiny, tmp_path):
    """Two workers until step 6, of which the first cannot write step 2; then one."""
    flags = FLAGS.format(tmp_path) + "--train-iters {} --micro-batch-size {} "
    failing = full_for(r"0002\.partial/state\.ckpt")
    check_failed_save(mindspore.run(tiny, flags.format(6, 16) + "--save-interval 2", 2, **failing), tmp_path)
    flip_a_bit(tmp_path / "iter_0000006" / "state.ckpt")
    check_fallback(mindspore.run(tiny, flags.format(5, 32)), "state.ckpt")
