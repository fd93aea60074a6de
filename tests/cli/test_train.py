"""mm-dit train: from a folder, and by an embedded name."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mindspeed_mm_dit
from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.configs.embedded import ENTRY_SCRIPT, config_folder, embedded_configs
from mindspeed_mm_dit.errors import ConfigError, PlatformError
from mindspeed_mm_dit.training.launch import Launch
from mindspeed_mm_dit.training.mindspore import launch as mindspore_launch
from tests.conftest import ROOT


def test_configs_of_the_examples_are_embedded(tmp_path, monkeypatch):
    folders = {path.parent.name for path in (ROOT / "examples/dit").glob("*/model.json")}
    assert set(embedded_configs()) == {"digits", *folders}
    assert config_folder("digits") == ROOT / "examples/dit" and ENTRY_SCRIPT == ROOT / "pretrain_dit.py"
    monkeypatch.chdir(tmp_path)  # a folder comes before an embedded name
    Path("digits").mkdir()
    assert config_folder("digits") == ROOT / "examples/dit"
    Path("digits/train.args").touch()
    assert config_folder("digits") == Path("digits")


def test_missing_config_files_are_named_together(tmp_path, capsys):
    with pytest.raises(ConfigError, match="'digits'"):
        config_folder("digts")
    with pytest.raises(ConfigError) as caught:
        config_folder(str(tmp_path))
    assert all(name in caught.value.reason for name in ("model.json", "data.json", "train.args"))
    (tmp_path / "train.args").write_text("--use-torch-fsdp2 --mm-model other.json")
    assert main(["train", str(tmp_path)]) == 2
    assert "lacks data.json, fsdp2.yaml\n" in capsys.readouterr().err


def test_python_m_is_mm_dit():
    command = [sys.executable, "-m", "mindspeed_mm_dit", "--version"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"mm-dit {mindspeed_mm_dit.__version__}\n")


def test_dry_run_leaves_nothing_behind(tmp_path):
    command = [sys.executable, "-m", "mindspeed_mm_dit", "train", "digits", "--dry-run"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "1,797 images" in done.stdout, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_msrun_is_that_of_the_interpreter(tmp_path, monkeypatch):
    (tmp_path / "python").touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", f"{tmp_path}/python3")
    launched = mindspore_launch._environment(Launch(1, 1, 0, "127.0.0.1", 1))
    assert shutil.which("python", path=launched["PATH"]) == f"{tmp_path}/python"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PlatformError, match="MindSpore"):
        mindspore_launch._check_msrun()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    mindspore_launch._check_msrun()
    (tmp_path / "python").unlink()
    with pytest.raises(PlatformError, match=f"none next to {tmp_path}/python3"):
        mindspore_launch._check_msrun()
