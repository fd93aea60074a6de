"""Runs on samples of several shapes: what is drawn, and what is refused."""

import numpy as np
import pytest
from PIL import Image

from mindspeed_mm_dit.cli.main import main
from tests.buckets_fixtures import write_configs, write_pictures
from tests.training.launch import Configs

pytestmark = pytest.mark.ranks

STEPS = "--global-batch-size 16 --lr 1e-3 --lr-decay-style constant --num-workers 1 "


def test_run_on_buckets_draws_samples_of_any_shape(tmp_path, capsys):
    configs = Configs(write_configs(tmp_path / "configs", write_pictures(tmp_path / "pictures"), valid_fraction=0.2))
    flags = f"--micro-batch-size 4 --train-iters 1 --save {tmp_path / 'saved'} --sample-interval 1 "
    configs.done(STEPS + flags + f"--tensorboard-dir {tmp_path / 'board'}")
    for name, size in (("a.npz", "8x16"), ("b.npz", "20x4"), ("c.png", "8x16"), ("d.html", "12x8")):
        asked = ["--classes", "0,1", "--num-per-class", "2", "--steps", "2", "--size", size]
        assert main(["sample", "--checkpoint", f"{tmp_path}/saved", *asked, "--output", f"{tmp_path}/{name}"]) == 0
    assert np.load(tmp_path / "a.npz")["arr_0"].shape == (4, 8, 16, 1)
    assert np.load(tmp_path / "b.npz")["arr_0"].shape == (4, 20, 4, 1)
    assert Image.open(tmp_path / "c.png").size[1] == 2 * (48 + 2)
    refused = ["sample", "--checkpoint", f"{tmp_path}/saved", "--size", "8x14", "--output", f"{tmp_path}/e.png"]
    assert main(refused) == 2 and "--size = 8x14" in capsys.readouterr().err
