"""mm-dit train: from a folder, by an embedded name, and out of an installed wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mindspeed_mm_dit
from mindspeed_mm_dit.cli.main import COMMANDS, main
from mindspeed_mm_dit.configs.embedded import ENTRY_SCRIPT, config_folder, embedded_configs
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.training.launch.variables import Launch
from mindspeed_mm_dit.training.mindspore import launch as mindspore_launch
from tests.conftest import ROOT


def test_every_config_of_the_examples_is_embedded_by_the_name_of_its_folder():
    folders = {path.parent.name for path in (ROOT / "examples/dit").glob("*/model.json")}
    assert set(embedded_configs()) == {"digits", *folders}
    assert config_folder("digits") == ROOT / "examples/dit" and ENTRY_SCRIPT == ROOT / "pretrain_dit.py"


def test_a_folder_comes_before_an_embedded_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("digits").mkdir()
    assert config_folder("digits") == ROOT / "examples/dit"
    Path("digits/train.args").touch()
    assert config_folder("digits") == Path("digits")


def test_a_name_that_is_no_config_is_told_the_nearest():
    with pytest.raises(ConfigError, match=r"CONFIG = digts: is no folder.*\n.*Did you mean 'digits'\? .*imagenet256"):
        config_folder("digts")


def test_without_a_command_every_command_is_listed(capsys):
    assert main([]) == 0
    said = capsys.readouterr().out.split()
    assert set(COMMANDS) <= set(said)


def test_a_misspelt_command_is_told_the_nearest(capsys):
    assert main(["smaple"]) == 2
    assert "mm-dit smaple: is no command\n    Cure: Did you mean 'sample'?" in capsys.readouterr().err


def test_python_m_is_mm_dit():
    done = subprocess.run(
        [sys.executable, "-m", "mindspeed_mm_dit", "--version"], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, f"mm-dit {mindspeed_mm_dit.__version__}\n")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package as its wheel installs it; the checkout is left as it was."""
    here = tmp_path_factory.mktemp("wheel")
    source = here / "source"
    for name in ("mindspeed_mm_dit", "examples"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "pretrain_dit.py"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    offline = ["--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "wheel", *offline, "--wheel-dir", str(here), str(source)], check=True)
    wheel = next(here.glob("*.whl"))
    subprocess.run([*pip, "install", "--no-index", "--no-deps", "--target", str(here / "site"), str(wheel)], check=True)
    return here / "site"


@pytest.mark.ranks
def test_the_wheel_trains_an_embedded_config_from_an_empty_folder(installed, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(installed), "CUDA_VISIBLE_DEVICES": ""}
    flags = "--train-iters 2 --log-interval 1 --global-batch-size 4 --host standalone"
    command = [sys.executable, str(installed / "bin/mm-dit"), "train", "digits", *flags.split()]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "iteration        2/       2" in done.stdout and str(ROOT) not in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"data", "outputs"}


def test_the_wheel_carries_every_file_of_the_embedded_configs(installed):
    there = installed / "mindspeed_mm_dit/examples"
    for folder in embedded_configs().values():
        for file in folder.glob("*.*"):
            if file.suffix in (".json", ".yaml", ".args"):
                copy = there / file.relative_to(ROOT / "examples/dit")
                assert copy.read_bytes() == file.read_bytes()


def test_the_wheel_carries_every_template_of_pages(installed):
    templates = {file.name for file in (ROOT / "mindspeed_mm_dit/templates").iterdir()}
    assert templates == {file.name for file in (installed / "mindspeed_mm_dit/templates").iterdir()}


def test_a_dry_run_leaves_nothing_behind(tmp_path):
    command = [sys.executable, "-m", "mindspeed_mm_dit", "train", "digits", "--dry-run"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0 and "1,797 images" in done.stdout, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_msrun_is_found_beside_the_interpreter_that_mm_dit_is_started_with(tmp_path, monkeypatch):
    for place in ("venv", "other"):
        for name in ("python", "msrun"):
            (tmp_path / place).mkdir(exist_ok=True)
            (tmp_path / place / name).touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", f"{tmp_path}/venv/python")
    for path in ("/nowhere", f"{tmp_path}/other"):
        monkeypatch.setenv("PATH", path)
        assert mindspore_launch._find_msrun() == f"{tmp_path}/venv/msrun"
        launched = mindspore_launch._environment(Launch(1, 1, 0, "127.0.0.1", 1))
        assert shutil.which("python", path=launched["PATH"]) == f"{tmp_path}/venv/python"
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert mindspore_launch._find_msrun() == f"{tmp_path}/other/msrun"
