"""What users' yamls and commands call by name is where they call it, wherever the code is."""

import subprocess
import sys

from tests.conftest import ROOT


def test_plugin_of_a_yaml_attaches_when_it_is_imported():
    code = "import importlib, pkgutil, mindspeed_mm_dit.hosts.native as plugin\n"
    code += "for module in pkgutil.walk_packages(plugin.__path__, plugin.__name__ + '.'):\n"
    code += "    importlib.import_module(module.name)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "training.plugin: mindspeed_mm_dit.hosts.native: mindspeed_mm, mindspeed cannot be found" in done.stderr
