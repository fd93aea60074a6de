"""A finished run stays one, whatever becomes of its report."""

from __future__ import annotations

import sys
from argparse import Namespace
from types import SimpleNamespace

import pytest

from mindspeed_mm_dit.configs.precision import FLOAT32
from mindspeed_mm_dit.training import report as module


def test_a_report_that_fails_ends_with_code_2_and_says_how_to_draw_again(tmp_path, monkeypatch, capfd):
    (tmp_path / "iter_0000005").mkdir()
    (tmp_path / "iter_0000005" / "run.json").write_text("{}")
    args = Namespace(
        report=True, save=str(tmp_path), train_iters=5, tensorboard_dir=None, report_sampler="ddim", report_steps=5,
        report_cfg_scale=1.0, seed=0,
        mm=SimpleNamespace(data=SimpleNamespace(dataset_param=SimpleNamespace(source="digits")), precision=FLOAT32),
    )  # fmt: skip
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(module, "open_data_set", lambda *_: SimpleNamespace(examples=lambda: {"label": [0]}))
    with pytest.raises(SystemExit) as ended:
        module.report(args)
    assert ended.value.code == 2
    said = capfd.readouterr().err
    assert "could not be drawn (exit code 1" in said and f"mm-dit sample --checkpoint {tmp_path}" in said
