"""An older Python is named, with its place, before it meets what it cannot read."""

import ast
import runpy
import sys

import pytest

from tests.conftest import ROOT

FIRST = ("pretrain_dit.py", "mindspeed_mm_dit/__init__.py")


def test_an_older_python_is_named(monkeypatch, capsys):
    monkeypatch.setattr(sys, "version_info", (3, 9, 18, "final", 0))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "mindspeed_mm_dit/__init__.py"))
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1
    assert "Python 3.10 or newer is needed" in said and sys.executable in said


@pytest.mark.parametrize("file", FIRST)
def test_an_older_python_can_read_as_far_as_that(file):
    tree = ast.parse((ROOT / file).read_text(), feature_version=(3, 7))
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    modules = [name for node in imports for name in [getattr(node, "module", None) or node.names[0].name]]
    ours = [name for name in modules if name.partition(".")[0] not in sys.stdlib_module_names]
    assert all(name.startswith("mindspeed_mm_dit") for name in ours)
