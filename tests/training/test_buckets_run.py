"""Runs on samples of several shapes: what ranks, micro-batches, sharding and resumes do not change."""

from __future__ import annotations

import re

import numpy as np
import pytest
from PIL import Image

from mindspeed_mm_dit.cli.main import main
from tests.buckets_fixtures import write_configs, write_pictures
from tests.training.launch import Configs

pytestmark = pytest.mark.ranks

LOSS_TOLERANCE = 2e-6  # float32 sums in another order
STEPS = "--global-batch-size 16 --lr 1e-3 --lr-decay-style constant --num-workers 1 "


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("configs")
    return Configs(write_configs(folder / "configs", write_pictures(folder / "pictures"), valid_fraction=0.2))


@pytest.fixture(scope="module")
def one_process(configs):
    outcome = configs.run(STEPS + "--train-iters 6 --micro-batch-size 4 --eval-interval 3 --eval-iters 2")
    assert outcome.code == 0, outcome.output
    assert re.search(
        r"buckets   8 x 8: \d+, 8 x 12: \d+, 12 x 8: \d+, 4 in a row; of each epoch \d+ are", outcome.output
    )
    return outcome


@pytest.mark.parametrize(
    ("ranks", "micro", "fsdp2", "sharing"),
    [
        (1, 1, None, 1), (2, 4, None, 1), pytest.param(4, 2, None, 1, marks=pytest.mark.campaign),
        (2, 2, "sharding_size: auto\n", 1), (4, 2, "sharding_size: 2\n", 1), (2, 4, None, 2),
    ],
    ids=["micro-batches", "two ranks", "four ranks", "sharded", "hybrid", "sharing images"],
)  # fmt: skip
def test_ranks_sharding_and_micro_batches_train_on_the_same_numbers(configs, one_process, ranks, micro, fsdp2, sharing):
    flags = f"--train-iters 6 --micro-batch-size {micro} --eval-interval 3 --eval-iters 2 "
    flags += f"--context-parallel-size {sharing} "
    if fsdp2:
        path = configs.folder / f"fsdp2-{ranks}.yaml"
        path.write_text("sub_modules_to_wrap:\n  - predictor.blocks.{*}\n" + fsdp2)
        flags += f"--use-torch-fsdp2 --fsdp2-config-path {path} "
    outcome = configs.run(STEPS + flags, ranks)
    assert outcome.code == 0, outcome.output
    assert outcome.losses.keys() == one_process.losses.keys() and len(one_process.losses) == 6
    for iteration, loss in one_process.losses.items():
        assert outcome.losses[iteration] == pytest.approx(loss, rel=LOSS_TOLERANCE), iteration
    found = outcome.validations
    assert found.keys() == {3, 6}
    for iteration, values in one_process.validations.items():
        assert [*map(float, found[iteration])] == pytest.approx([*map(float, values)], rel=LOSS_TOLERANCE)


def test_by_token_ranks_train_on_the_same_numbers_which_are_others(configs, one_process):
    flags = "--train-iters 3 --loss-by token "
    alone, ranks = (
        configs.run(STEPS + flags + f"--micro-batch-size {size}", count) for size, count in ((4, 1), (2, 2))
    )
    assert alone.code == ranks.code == 0, alone.output + ranks.output
    assert ranks.losses == pytest.approx(alone.losses, rel=LOSS_TOLERANCE) and len(alone.losses) == 3
    assert all(abs(loss - one_process.losses[step]) > 1e-4 for step, loss in alone.losses.items())


def test_a_resumed_run_prints_the_same_lines(configs, one_process, tmp_path):
    flags = STEPS + f"--micro-batch-size 4 --save {tmp_path} --load {tmp_path} "
    configs.run(flags + "--train-iters 3")
    resumed = configs.run(flags + "--train-iters 6")
    assert "resumed from" in resumed.output and "changed since" not in resumed.output
    assert resumed.lines == {iteration: line for iteration, line in one_process.lines.items() if iteration > 3}


def test_samples_of_any_shape_are_drawn_from_a_run_on_buckets(configs, tmp_path, capsys):
    flags = f"--micro-batch-size 4 --train-iters 1 --save {tmp_path / 'saved'} --sample-interval 1 "
    outcome = configs.run(STEPS + flags + f"--tensorboard-dir {tmp_path / 'board'}")
    assert outcome.code == 0, outcome.output
    for name, size in (("a.npz", "8x16"), ("b.npz", "20x4"), ("c.png", "8x16"), ("d.html", "12x8")):
        asked = ["--classes", "0,1", "--num-per-class", "2", "--steps", "2", "--size", size]
        assert main(["sample", "--checkpoint", f"{tmp_path}/saved", *asked, "--output", f"{tmp_path}/{name}"]) == 0
    assert np.load(tmp_path / "a.npz")["arr_0"].shape == (4, 8, 16, 1)
    assert np.load(tmp_path / "b.npz")["arr_0"].shape == (4, 20, 4, 1)
    assert Image.open(tmp_path / "c.png").size[1] == 2 * (48 + 2)
    capsys.readouterr()
    refused = ["sample", "--checkpoint", f"{tmp_path}/saved", "--size", "8x14", "--output", f"{tmp_path}/e.png"]
    assert main(refused) == 2 and "--size = 8x14: makes no whole number of patches" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("buckets", "said"),
    [
        ([[8, 12], [12, 8], [8, 8]], "a graph for each of up to 3 shapes"),
        ({"area": 8000, "multiple_of": 4, "max_aspect_ratio": 4}, "one graph, with open sizes, for all of up to"),
    ],
)
def test_compiled_graphs_are_counted_and_bounded(configs, tmp_path, buckets, said):
    own = write_configs(tmp_path, configs.folder.parent / "pictures", buckets=buckets, bucket_group=1)
    flags = "--train-iters 1 --lr 1e-3 --micro-batch-size 1 --global-batch-size 4 --torch-compile --dry-run"
    outcome = Configs(own).run(flags)
    assert outcome.code == 0 and f"compiled  {said}" in outcome.output, outcome.output


def test_other_buckets_are_said_where_a_run_goes_on(configs, tmp_path):
    flags = STEPS + f"--micro-batch-size 2 --save {tmp_path / 'saved'} --load {tmp_path / 'saved'} "
    configs.run(flags + "--train-iters 1")
    other = Configs(write_configs(tmp_path / "other", configs.folder.parent / "pictures", bucket_group=2))
    outcome = other.run(flags + "--train-iters 2")
    assert outcome.code == 0 and "dataset_param.buckets" in outcome.output and "2 in a row" in outcome.output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--micro-batch-size 8 --global-batch-size 16", "--micro-batch-size = 8: does not divide"),
        ("--micro-batch-size 4 --global-batch-size 64", "fewer than --global-batch-size 64"),
    ],
)
def test_a_batch_that_buckets_cannot_give_is_refused_before_the_run(configs, flags, message):
    outcome = configs.run(f"--train-iters 2 --lr 1e-3 --lr-decay-style constant {flags}")
    assert outcome.code == 2 and message in outcome.output
