"""What is missing or too old is one line that names it."""

from __future__ import annotations

import importlib
import importlib.metadata
from pathlib import Path
from types import ModuleType

import pytest

from mindspeed_mm_dit.errors import PlatformError
from mindspeed_mm_dit.framework import activate
from tests.conftest import ROOT
from tests.training.launch import Configs


@pytest.mark.parametrize("version", ["2.6.0+cpu", "1.13.1"])
def test_a_pytorch_that_is_too_old_is_named(
    framework: ModuleType, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(PlatformError, match=rf"{version.replace('+', '.')} is too old\n.*2\.7 or newer"):
        activate(framework.active())


@pytest.mark.parametrize("version", ["2.7.0", "2.13.0+cu130", "3.0"])
def test_a_newer_one_is_taken(framework: ModuleType, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    activate(framework.active())


def test_a_run_imports_no_megatron_and_none_of_pytorchs_compiler(tmp_path: Path, digits_folder: Path) -> None:
    """They take longer to import than all the rest."""
    configs = Configs.create(tmp_path, digits_folder, hidden_size=32, num_layers=1, num_heads=2)
    told = "import atexit, sys; atexit.register(lambda: print('imported:', *sorted(sys.modules)))"
    (tmp_path / "sitecustomize.py").write_text(told)
    outcome = configs.run("--train-iters 1 --micro-batch-size 4 --lr 1e-3", PYTHONPATH=f"{tmp_path}:{ROOT}")
    imported = outcome.output.partition("imported:")[2].split()
    assert outcome.code == 0 and "torch" in imported, outcome.output
    assert not {"megatron.core", "torch._inductor.compile_fx", "tensorboard", "diffusers"} & set(imported)


def test_a_second_framework_in_a_process_and_one_that_there_is_not_are_refused(framework: ModuleType) -> None:
    other = {"pytorch": "mindspore", "mindspore": "pytorch"}[framework.active()]
    with pytest.raises(PlatformError, match=rf"--ai-framework = {other}: {framework.active()} is already active"):
        activate(other)


def test_a_framework_that_there_is_not_or_that_is_not_here_is_named(
    framework: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(framework, "_active", None)
    with pytest.raises(PlatformError, match="--ai-framework = jax: must be one of pytorch, mindspore"):
        activate("jax")

    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'mindspore'")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(PlatformError, match="--ai-framework = mindspore: cannot be used here: No module"):
        activate("mindspore")
