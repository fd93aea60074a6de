"""A run may change the framework on its way."""

from __future__ import annotations

import importlib.util

import pytest

from mindspeed_mm_dit.checkpoint.convert import convert
from tests.training.launch import Configs

both = all(importlib.util.find_spec(name) for name in ("torch", "mindspore"))
FLAGS = "--micro-batch-size 8 --global-batch-size 8 --lr 1e-3 --lr-decay-style constant --seed 3"


@pytest.mark.ranks
@pytest.mark.skipif(not both, reason="PyTorch and MindSpore are not both installed here")
def test_pytorch_then_mindspore_then_pytorch_is_one_loss_curve(tmp_path, digits_folder):
    configs = Configs.create(tmp_path, digits_folder, hidden_size=32, num_layers=2, num_heads=2)

    def run(flags: str) -> list[float]:
        outcome = configs.run(f"{FLAGS} {flags}")
        assert outcome.code == 0, outcome.output[-2000:]
        return list(outcome.losses.values())

    whole = run("--train-iters 9")
    moved = run("--train-iters 3 --save one")
    convert(tmp_path / "one", tmp_path / "two", "mindspore")
    moved += run("--train-iters 6 --load two --save two --ai-framework mindspore")
    convert(tmp_path / "two", tmp_path / "three", "pytorch")
    moved += run("--train-iters 9 --load three")
    assert len(whole) == 9 and moved == pytest.approx(whole, rel=1e-5)  # six printed digits, other order of sums
