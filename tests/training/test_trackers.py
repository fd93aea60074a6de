"""One contract for what keeps the curves of a run; whichever of them is installed is held to it."""

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mindspeed_mm_dit.errors import ConfigError, PlatformError
from mindspeed_mm_dit.training.loggers import registry
from mindspeed_mm_dit.training.loggers.registry import (
    METRICS_LOGGERS,
    GuardedLogger,
    LoggerContext,
    MetricsLoggerKind,
    check_metrics_loggers,
    open_metrics_loggers,
)
from tests.conftest import run_config

PICTURE = np.full((8, 8, 3), 200, np.uint8)
FLAGS = {
    "tensorboard": lambda folder: {"tensorboard_dir": str(folder)},
    "wandb": lambda folder: {"wandb_project": "digits", "wandb_exp_name": "first", "wandb_save_dir": str(folder)},
    "swanlab": lambda folder: {"swanlab_project": "digits", "swanlab_exp_name": "first", "save": str(folder / "save")},
}


def flags(**given):
    return run_config(lr=0.5, **given)


def written(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return b"".join(path.read_bytes() for path in files), [path.name for path in files if path.suffix == ".png"]


@pytest.mark.parametrize("kind", FLAGS)
def test_values_and_pictures_are_on_disk_once_it_is_closed(kind, tmp_path, monkeypatch, capfd):
    for package in METRICS_LOGGERS[kind].packages:
        pytest.importorskip(package)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    args = flags(**FLAGS[kind](tmp_path))
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
    with pytest.raises(PlatformError, match=f"(?s)--{extra}-project = digits.*pip install .*{extra}"):
        check_metrics_loggers(flags(**project))
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: name)
    with pytest.raises(ConfigError, match=f"(?s)no folder to write to.*--{extra}-save-dir DIR"):
        check_metrics_loggers(flags(**project))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=f"--{extra}-save-dir = .*is a file"):
        check_metrics_loggers(flags(**project, **{f"{extra}_save_dir": str(tmp_path / "file")}))


def test_a_name_that_weights_and_biases_would_refuse_later_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: name)
    for name in ("a/b", "a\\b", "a#b", "a?b", "a%b", "a:b", "a" * 129):
        with pytest.raises(ConfigError, match="takes up to 128 letters"):
            check_metrics_loggers(flags(wandb_project=name, wandb_save_dir=str(tmp_path)))
    check_metrics_loggers(flags(wandb_project="a" * 128, wandb_save_dir=str(tmp_path)))


class Failing:
    def add(self, iteration, values):
        raise RuntimeError("no network\nand more")


def test_a_tracker_that_fails_is_said_once_and_ends_nothing(capsys):
    metrics_logger = GuardedLogger(
        MetricsLoggerKind("wandb", object, lambda *given: Failing()), None, LoggerContext(0, "", {})
    )
    for iteration in (1, 2):
        metrics_logger.add(iteration, {})
    metrics_logger.close()
    assert capsys.readouterr().err.count("RuntimeError: no network") == 1
    GuardedLogger(MetricsLoggerKind("wandb", object, lambda *given: 1 / 0), None, LoggerContext(0, "", {})).add(1, {})
    assert "ZeroDivisionError" in capsys.readouterr().err
