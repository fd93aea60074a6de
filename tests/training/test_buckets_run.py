"""Runs on samples of several shapes: what is drawn, and what is refused."""

from __future__ import annotations

import re

import numpy as np
import pytest
from PIL import Image

from mindspeed_mm_dit.cli.main import main
from tests.buckets_fixtures import write_configs, write_pictures
from tests.training.launch import Configs

pytestmark = pytest.mark.ranks

STEPS = "--global-batch-size 16 --lr 1e-3 --lr-decay-style constant --num-workers 1 "


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("configs")
    return Configs(write_configs(folder / "configs", write_pictures(folder / "pictures"), valid_fraction=0.2))


def test_samples_of_any_shape_are_drawn_from_a_run_on_buckets(configs, tmp_path, capsys):
    flags = f"--micro-batch-size 4 --train-iters 1 --save {tmp_path / 'saved'} --sample-interval 1 "
    outcome = configs.run(STEPS + flags + f"--tensorboard-dir {tmp_path / 'board'}")
    assert outcome.code == 0, outcome.output
    assert re.search(r"buckets   8 x 8: \d+, 8 x 12: \d+, 12 x 8: \d+, 4 in a row; of each epoch \d+", outcome.output)
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
