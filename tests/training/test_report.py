"""A finished run stays one, whatever becomes of its report."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from mindspeed_mm_dit.configs.model import load_model_config
from mindspeed_mm_dit.configs.precision import FLOAT32
from mindspeed_mm_dit.training import report as module
from tests.conftest import ROOT, run_config


def test_a_report_that_fails_ends_with_code_2_and_says_how_to_draw_again(tmp_path, monkeypatch, capfd):
    (tmp_path / "iter_0000005").mkdir()
    (tmp_path / "iter_0000005" / "run.json").write_text("{}")
    args = run_config(
        report="always", save=str(tmp_path), train_iters=5, begun_at=0, global_batch_size=4, sample_prompts=None,
        tensorboard_dir=None, report_sampler="ddim", report_steps=5,
        report_cfg_scale=1.0, seed=0,
        mm=SimpleNamespace(
            captions=(), model=load_model_config(ROOT / "examples/dit/model.json"), precision=FLOAT32,
            data=SimpleNamespace(dataset_param=SimpleNamespace(source="digits")),
        ),
    )  # fmt: skip
    monkeypatch.setattr(sys, "executable", "/bin/false")
    data = SimpleNamespace(examples=lambda prompts: {"label": [0]}, shapes_drawn=list)
    monkeypatch.setattr(module, "open_data_set", lambda *_: data)
    with pytest.raises(SystemExit) as ended:
        module.report(args)
    assert ended.value.code == 2
    said = capfd.readouterr().err
    assert "could not be drawn (exit code 1" in said and f"mm-dit sample --checkpoint {tmp_path}" in said


@pytest.mark.parametrize(
    ("begun_at", "iterations", "asked", "said"),
    [
        (5, 5, "always", "iteration 5 of 5: the run is complete; a larger --train-iters goes on; mm-dit sample"),
        (
            0,
            104,
            "short",
            "nothing is drawn: it would take longer than the training (add '--report always' to draw all the same)",
        ),
        (100, 104, "short", "nothing is drawn"),
    ],
)
def test_a_report_longer_than_the_training_and_one_of_a_run_that_was_complete_are_not_drawn(
    tmp_path, monkeypatch, capsys, begun_at, iterations, asked, said
):
    """105 steps of 64 images are 20,160 answers' time; 200 samples of 50 steps with guidance are 20,000 answers."""
    (tmp_path / f"iter_{iterations:07d}").mkdir()
    (tmp_path / f"iter_{iterations:07d}" / "run.json").write_text("{}")
    args = run_config(
        report=asked, save=str(tmp_path), train_iters=iterations, begun_at=begun_at, global_batch_size=64,
        report_steps=50, mm=SimpleNamespace(captions=()),
    )  # fmt: skip
    monkeypatch.setattr(module.subprocess, "run", None)
    module.report(args)
    assert said in capsys.readouterr().out
    assert asked == "always" or not module._why_nothing(replace(args, train_iters=iterations + 1))
