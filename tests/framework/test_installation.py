"""What this machine has: what is missing or too old is named; which memory counts, and that it is given back."""

import ast
import importlib
import importlib.metadata
import os
import runpy
import sys
from types import SimpleNamespace

import pytest

from mindspeed_mm_dit.errors import PlatformError
from mindspeed_mm_dit.framework import activate, contract
from tests.conftest import ROOT

INSTALLED = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_older_python_is_named(monkeypatch, capsys):
    monkeypatch.setattr(sys, "version_info", (3, 9, 18, "final", 0))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "mindspeed_mm_dit/__init__.py"))
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1
    assert "Python 3.10" in said and sys.executable in said


@pytest.mark.parametrize("file", ["pretrain_dit.py", "mindspeed_mm_dit/__init__.py"])
def test_older_python_can_read_as_far_as_that(file):
    tree = ast.parse((ROOT / file).read_text(), feature_version=(3, 7))
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    modules = [getattr(node, "module", None) or node.names[0].name for node in imports]
    ours = [name for name in modules if name.partition(".")[0] not in sys.stdlib_module_names]
    assert all(name.startswith("mindspeed_mm_dit") for name in ours)


def test_pytorch_is_taken_from_2_7_on(framework, monkeypatch):
    for version, is_old in (("2.6.0+cpu", True), ("1.13.1", True), ("2.7.0", False), ("2.13.0", False), ("3.0", False)):
        monkeypatch.setattr(importlib.metadata, "version", lambda name, version=version: version)
        if is_old:
            with pytest.raises(PlatformError, match=version.replace("+", ".")):
                activate(framework.active())
        else:
            activate(framework.active())


def test_second_unknown_or_missing_framework_is_refused(framework, monkeypatch):
    other = {"pytorch": "mindspore", "mindspore": "pytorch"}[framework.active()]
    with pytest.raises(PlatformError, match=rf"--ai-framework = {other}.*{framework.active()}"):
        activate(other)
    monkeypatch.setattr(framework, "_active", None)
    with pytest.raises(PlatformError, match="--ai-framework = jax"):
        activate("jax")

    def missing(name):
        raise ModuleNotFoundError("No module named 'mindspore'")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(PlatformError, match=r"--ai-framework = mindspore.*No module"):
        activate("mindspore")


@pytest.mark.parametrize(("limit", "found"), [("1048576\n", 2**20), ("max\n", INSTALLED), (f"{2**63}\n", INSTALLED)])
def test_smaller_of_installed_and_allowed_memory_counts(tmp_path, monkeypatch, limit, found):
    (tmp_path / "limit").write_text(limit)
    monkeypatch.setattr(contract, "_LIMITS", (tmp_path / "limit", tmp_path / "no such file"))
    assert contract.host_memory_bytes() == found


def test_npu_gives_back_its_memory_where_torch_accelerator_cannot(monkeypatch):
    torch = pytest.importorskip("torch")
    from mindspeed_mm_dit.framework.pytorch import runtime

    emptied = []
    npu = SimpleNamespace(is_available=lambda: True, empty_cache=lambda: emptied.append("npu"))
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delattr(torch.accelerator, "empty_cache", raising=False)  # as in 2.7 and 2.8
    runtime.free_memory()
    assert emptied == ["npu"]
