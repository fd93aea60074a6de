"""A finished run stays one, whatever becomes of its report."""

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
        report="always", save=str(tmp_path), train_iters=5, start_iteration=0, global_batch_size=4, sample_prompts=None,
        tensorboard_dir=None, report_sampler="ddim", report_steps=5,
        report_cfg_scale=1.0, seed=0,
        mm=SimpleNamespace(
            captions=(), model=load_model_config(ROOT / "examples/dit/model.json"), precision=FLOAT32,
            data=SimpleNamespace(dataset_param=SimpleNamespace(source="digits")),
            data_set=SimpleNamespace(examples=lambda prompts: {"label": [0]}, sampled_shapes=list),
        ),
    )  # fmt: skip
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(SystemExit) as ended:
        module.report(args)
    assert ended.value.code == 2
    said = capfd.readouterr().err
    assert "could not be generated (exit code 1" in said and f"mm-dit sample --checkpoint {tmp_path}" in said


def test_a_report_longer_than_its_training_is_not_drawn(tmp_path):
    """105 steps of 64 images are 20,160 answers' time; 200 samples of 50 steps with guidance are 20,000 answers."""
    mm = SimpleNamespace(captions=())
    args = run_config(report="short", save=str(tmp_path), global_batch_size=64, report_steps=50, mm=mm)
    for start_iteration, steps, is_drawn in ((0, 104, False), (0, 105, True), (105, 105, False)):
        assert (
            bool(module._reason_for_no_samples(replace(args, start_iteration=start_iteration, train_iters=steps)))
            is not is_drawn
        )
