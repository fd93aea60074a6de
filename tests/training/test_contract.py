"""Both engines and both modules of checkpoints offer what the contract says; they are read, not imported."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from mindspeed_mm_dit.training import contract
from tests.conftest import ROOT

PACKAGE = ROOT / "mindspeed_mm_dit"
ENGINES = [PACKAGE / f"training/{framework}/engine.py" for framework in ("pytorch", "mindspore")]
CHECKPOINTS = [PACKAGE / f"checkpoint/{name}.py" for name in ("torch_dcp", "mindspore_ckpt")]


def names_of(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """Return functions, classes and imports of a file or class by name."""
    found = {node.name: node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    imported = [node for node in body if isinstance(node, ast.ImportFrom)]
    return {**{alias.asname or alias.name: node for node in imported for alias in node.names}, **found}


def names_asked_for(protocol: type) -> list[str]:
    """Return what a protocol, and those that it extends, ask for."""
    asking = [kind for kind in protocol.__mro__ if kind.__module__ == contract.__name__]
    return [name for kind in asking for name in vars(kind) if not name.startswith("_")]


def methods_of(name: str, path: Path) -> dict[str, ast.FunctionDef]:
    """Return the methods of a class of the file ``path`` and of the classes of this package that it extends."""
    names = names_of(ast.parse(path.read_text()).body)
    if isinstance(names[name], ast.ImportFrom):
        return methods_of(name, PACKAGE.parent / f"{names[name].module.replace('.', '/')}.py")
    found = names_of(names[name].body)
    for base in names[name].bases:
        if isinstance(base, ast.Name) and base.id in names:
            found = {**methods_of(base.id, path), **found}
    return found


def parameters_of(function: ast.FunctionDef) -> list[tuple[str, bool]]:
    """(name, whether it may be left out) of each parameter."""
    arguments = function.args.args
    required = len(arguments) - len(function.args.defaults)
    return [(argument.arg, position >= required) for position, argument in enumerate(arguments)]


@pytest.mark.parametrize("path", ENGINES, ids=lambda path: path.parent.name)
def test_an_engine_module_has_the_names_and_its_engine_the_methods(path):
    names = names_of(ast.parse(path.read_text()).body)
    assert set(names_asked_for(contract.EngineModule)) <= set(names)
    methods = methods_of("Engine", path)
    for name in names_asked_for(contract.Engine):
        wanted = inspect.signature(getattr(contract.Engine, name)).parameters.values()
        assert parameters_of(methods[name]) == [(p.name, p.default is not p.empty) for p in wanted], name


@pytest.mark.parametrize("path", CHECKPOINTS, ids=lambda path: path.stem)
def test_a_module_of_checkpoints_has_the_names(path):
    names = names_of(ast.parse(path.read_text()).body)
    assert set(names_asked_for(contract.Checkpoints)) <= set(names)
    assert "write" in names_of(names["Writer"].body)


def test_the_contract_asks_for_what_a_run_uses():
    methods = ["train_step", "move_power_emas", "eval_step", "averaged", "num_parameters", "state", "load"]
    assert names_asked_for(contract.Engine) == methods
    asked = {"Writer", "problem_of", "has_optimizer", "check_architecture", "entries_for_mindspeed_mm"}
    assert set(names_asked_for(contract.Checkpoints)) == asked
