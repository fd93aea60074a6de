"""What makes a step faster leaves the losses as they are; and what is logged about it."""

from __future__ import annotations

import numpy as np
import pytest

from mindspeed_mm_dit.evaluation.curves import read_scalar
from mindspeed_mm_dit.planning.model_size import train_flop
from tests.training.launch import Configs

pytestmark = pytest.mark.ranks

STEPS = "--train-iters 6 --global-batch-size 16 --lr 1e-3 --lr-decay-style constant --num-workers 1 --seed 1 "


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, digits_folder):
    return Configs.create(tmp_path_factory.mktemp("tiny"), digits_folder, hidden_size=32, num_layers=2, num_heads=2)


@pytest.fixture(scope="module")
def plain(tiny):
    outcome = tiny.run(STEPS + "--micro-batch-size 16 --peak-tflops 0.5 --tensorboard-dir board")
    assert outcome.code == 0, outcome.output
    return outcome.losses


@pytest.mark.parametrize("ranks", [1, 2])
def test_compiled_blocks_learn_the_same(tiny, plain, ranks):
    path = tiny.folder / "fsdp2.yaml"
    path.write_text(
        "sharding_size: auto\nsub_modules_to_wrap: ['predictor.blocks.{*}']\n"
        "recompute_modules: ['predictor.blocks.{0}']\nuse_reentrant: false\n"
    )
    sharding = f"--use-torch-fsdp2 --fsdp2-config-path {path} " if ranks > 1 else ""
    outcome = tiny.run(STEPS + sharding + f"--torch-compile --micro-batch-size {16 // ranks}", ranks)
    assert outcome.code == 0, outcome.output
    assert outcome.losses.keys() == plain.keys()
    for iteration, loss in plain.items():  # fused kernels round float32 differently
        assert outcome.losses[iteration] == pytest.approx(loss, rel=1e-5), iteration


def test_tensorboard_has_the_share_of_the_peak(tiny, plain):
    from mindspeed_mm_dit.configs.model import load_model_config

    flop = train_flop(load_model_config(tiny.folder / "model.json").predictor)
    steps, rates = read_scalar(tiny.folder / "board", "train/images_per_second")
    same_steps, shares = read_scalar(tiny.folder / "board", "train/mfu")
    assert steps.tolist() == same_steps.tolist() == list(plain)
    np.testing.assert_allclose(shares, rates * flop / 0.5e12, rtol=1e-5)
