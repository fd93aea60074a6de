"""The list of what we rely on in the host: complete, and true where unpacked trees are at hand."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from mindspeed_mm_dit.hosts.megatron.contract import RELIED_ON
from tests.conftest import ROOT
from tests.contract.hosted import needs_trees, tree

ROOM = ROOT / "mindspeed_mm_dit/hosts/megatron"
HOST = ("megatron", "mindspeed", "mindspeed_mm", "checkpoint")


def imports(path: Path) -> list[tuple[str, str]]:
    """(module, name) of everything a file imports from the host."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    return [(n.module, a.name) for n in nodes if n.module and n.module.split(".")[0] in HOST for a in n.names]


def test_the_list_names_everything_the_room_imports_from_the_host() -> None:
    found = {pair for path in ROOM.glob("*.py") for pair in imports(path)} - {
        ("megatron.core.package_info", "__version__")
    }
    assert found == {(module, name) for module, names in RELIED_ON.items() for name in names}


def test_only_the_rooms_of_the_host_import_mindspeed() -> None:
    rooms = {ROOM, ROOM.parent / "native"}
    others = [path for path in (ROOT / "mindspeed_mm_dit").rglob("*.py") if not rooms & set(path.parents)]
    assert not [path for path in others if any(m.startswith("mindspeed") for m, _ in imports(path))]


@needs_trees
@pytest.mark.parametrize("module", RELIED_ON)
def test_the_host_has_what_the_list_says(module: str) -> None:
    homes = {"megatron": "MEGATRON_HOME", "mindspeed": "MINDSPEED_HOME"}
    path = tree(homes.get(module.split(".")[0], "MINDSPEED_MM_HOME")) / module.replace(".", "/")
    file = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
    known = {name: node for node in ast.parse(file.read_text()).body for name in _names(node)}
    for name, parameters in RELIED_ON[module].items():
        assert name in known, f"{module} has no {name}"
        if parameters is not None:
            assert _parameters(known[name]) == parameters, f"{module}.{name}"


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return [alias.asname or alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []


def _parameters(node: ast.stmt) -> tuple[str, ...]:
    if isinstance(node, ast.ClassDef):
        node = next(n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
    assert isinstance(node, ast.FunctionDef)
    return tuple(argument.arg for argument in node.args.args if argument.arg != "self")
