"""What a run says: its log line, its curves on disk, and its report, whatever becomes of which it stays finished."""

import sys
from dataclasses import replace
from datetime import datetime
from types import SimpleNamespace

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mindspeed_mm_dit.configs.fsdp2 import FLOAT32
from mindspeed_mm_dit.configs.model import load_model_config
from mindspeed_mm_dit.errors import ConfigError, PlatformError
from mindspeed_mm_dit.training import report as module
from mindspeed_mm_dit.training.log import RunLog, StepRecord, format_line
from mindspeed_mm_dit.training.loggers import registry
from mindspeed_mm_dit.training.loggers.registry import (
    METRICS_LOGGERS,
    GuardedLogger,
    LoggerContext,
    MetricsLoggerSpec,
    check_metrics_loggers,
    open_metrics_loggers,
)
from tests.conftest import ROOT, run_config


def test_a_report_that_fails_ends_with_code_2_and_says_how_to_draw_again(tmp_path, monkeypatch, capfd):
    (tmp_path / "iter_0000005").mkdir()
    (tmp_path / "iter_0000005" / "run.json").write_text("{}")
    mm = SimpleNamespace(
        captions=(), model=load_model_config(ROOT / "examples/dit/model.json"), precision=FLOAT32,
        data=SimpleNamespace(dataset_param=SimpleNamespace(source="digits")),
        data_set=SimpleNamespace(examples=lambda prompts: {"label": [0]}, sampled_shapes=list),
    )  # fmt: skip
    drawn = {"report": "always", "report_sampler": "ddim", "report_steps": 5, "report_cfg_scale": 1.0, "mm": mm}
    args = run_config(save=str(tmp_path), train_iters=5, start_iteration=0, global_batch_size=4, seed=0, **drawn)
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
        reason = module._reason_for_no_samples(replace(args, start_iteration=start_iteration, train_iters=steps))
        assert bool(reason) is not is_drawn


HOST_LINE = (
    " [2026-11-20 20:41:35] iteration        1/       5 | consumed samples:            4 | elapsed time per iteration "
    "(ms): 195.1 | learning rate: 1.000000E-03 | global batch size:     4 | loss: 1.098573E+00 | loss scale: 1.0 | "
    "grad norm: 0.627 | num zeros: 0.0 | number of skipped iterations:   0 | number of nan iterations:   0 |"
)
RECORD = StepRecord(
    iteration=50, train_iters=800, consumed_samples=6400, ms_per_iteration=100.0, learning_rate=1e-3,
    global_batch_size=128, loss=0.5, grad_norm=0.627, nan_iterations=0,
)  # fmt: skip


def test_the_log_line_is_mindspeed_mms_to_the_letter():
    first = {"iteration": 1, "train_iters": 5, "consumed_samples": 4, "ms_per_iteration": 195.1}
    record = replace(RECORD, **first, global_batch_size=4, loss=1.098573)
    assert format_line(record, datetime(2026, 11, 20, 20, 41, 35)) == HOST_LINE


def test_estimate_is_said_at_once_and_each_minute_but_of_seconds(capsys, monkeypatch):
    RunLog(prints=True, train_iters=800, iteration=0).record(replace(RECORD, ms_per_iteration=20))
    assert "left" not in capsys.readouterr().out
    now = iter([0.0, 59.0, 61.0])
    monkeypatch.setattr("mindspeed_mm_dit.training.log.time.monotonic", lambda: next(now))
    log = RunLog(prints=True, train_iters=800, iteration=49)
    for _ in range(3):
        log.record(RECORD)
    said = capsys.readouterr().out.splitlines()
    estimate = " about 0:01:15 left of 800 iterations"
    assert [number for number, line in enumerate(said) if line == estimate] == [1, 4]
    assert len(said) == 5 and said[2].split("]")[1] == format_line(RECORD, datetime.now()).split("]")[1]


PICTURE = np.full((8, 8, 3), 200, np.uint8)
TRACKED = {
    "tensorboard": lambda folder: {"tensorboard_dir": str(folder)},
    "wandb": lambda folder: {"wandb_project": "digits", "wandb_exp_name": "first", "wandb_save_dir": str(folder)},
    "swanlab": lambda folder: {"swanlab_project": "digits", "swanlab_exp_name": "first", "save": str(folder / "save")},
}


def written(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return b"".join(path.read_bytes() for path in files), [path.name for path in files if path.suffix == ".png"]


@pytest.mark.parametrize("kind", TRACKED)
def test_values_and_pictures_are_on_disk_once_it_is_closed(kind, tmp_path, monkeypatch, capfd):
    for package in METRICS_LOGGERS[kind].packages:
        pytest.importorskip(package)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    args = run_config(**TRACKED[kind](tmp_path))
    check_metrics_loggers(args)
    (metrics_logger,) = open_metrics_loggers(args, 5)
    metrics_logger.add(6, {"train/loss": 0.25, "valid/loss_noise_0-25": 0.5})
    metrics_logger.add(7, {"train/loss": 0.125})
    metrics_logger.add_picture(7, "samples", PICTURE)
    metrics_logger.close()
    assert "records no more" not in capfd.readouterr().err
    if kind == "tensorboard":
        board = EventAccumulator(str(tmp_path))
        board.Reload()
        assert [(event.step, event.value) for event in board.Scalars("train/loss")] == [(6, 0.25), (7, 0.125)]
        assert [event.step for event in board.Images("samples")] == [7]
    else:
        content, pictures = written(tmp_path)
        assert b"train/loss" in content and b"valid/loss_noise_0-25" in content and pictures


@pytest.mark.parametrize("extra", ["wandb", "swanlab"])
def test_a_tracker_not_installed_or_without_a_folder_is_named(extra, monkeypatch, tmp_path):
    project = {f"{extra}_project": "digits"}
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PlatformError, match=rf"(?s)--{extra}-project = digits.*pip install .*{extra}"):
        check_metrics_loggers(run_config(**project))
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: name)
    with pytest.raises(ConfigError, match=rf"(?s)no folder to write to.*--{extra}-save-dir DIR"):
        check_metrics_loggers(run_config(**project))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=rf"--{extra}-save-dir = .*is a file"):
        check_metrics_loggers(run_config(**project, **{f"{extra}_save_dir": str(tmp_path / "file")}))


def test_a_name_that_weights_and_biases_would_refuse_later_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: name)
    for name in ("a/b", "a\\b", "a#b", "a?b", "a%b", "a:b", "a" * 129):
        with pytest.raises(ConfigError, match=r"--wandb-project = .* at most 128 letters"):
            check_metrics_loggers(run_config(wandb_project=name, wandb_save_dir=str(tmp_path)))
    check_metrics_loggers(run_config(wandb_project="a" * 128, wandb_save_dir=str(tmp_path)))


class Failing:
    def add(self, iteration, values):
        raise RuntimeError("no network\nand more")


def test_a_tracker_that_fails_is_said_once_and_ends_nothing(capsys):
    for opened, said in (Failing, "RuntimeError: no network"), (lambda: 1 / 0, "ZeroDivisionError"):
        kind = MetricsLoggerSpec("wandb", object, lambda *given, opened=opened: opened())
        metrics_logger = GuardedLogger(kind, None, LoggerContext(0, "", {}))
        for iteration in (1, 2):
            metrics_logger.add(iteration, {})
        metrics_logger.close()
        assert capsys.readouterr().err.count(said) == 1
