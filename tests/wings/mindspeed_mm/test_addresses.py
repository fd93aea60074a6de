"""What users' yamls and commands call by name is where they call it, wherever the code is."""

from __future__ import annotations

import runpy
import subprocess
import sys

import pytest

from tests.conftest import ROOT


@pytest.mark.parametrize("name", ["native", "megatron.run", "megatron.features"])
def test_a_command_of_the_host_says_its_usage(name, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", [name])
    with pytest.raises(SystemExit) as end:
        runpy.run_module(f"mindspeed_mm_dit.hosts.{name}", run_name="__main__")
    said = capsys.readouterr().err + str(end.value)
    assert f"usage: python -m mindspeed_mm_dit.hosts.{name} " in said


def test_what_a_yaml_names_as_plugin_attaches_when_it_is_imported() -> None:
    code = "import importlib, pkgutil, mindspeed_mm_dit.hosts.native as plugin\n"
    code += "for module in pkgutil.walk_packages(plugin.__path__, plugin.__name__ + '.'):\n"
    code += "    importlib.import_module(module.name)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "training.plugin: mindspeed_mm_dit.hosts.native: mindspeed_mm, mindspeed cannot be found" in done.stderr
