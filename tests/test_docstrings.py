"""A method says what it does, or the base or Protocol that first has it does."""

from __future__ import annotations

import ast
from pathlib import Path

from torch.distributed.elastic.rendezvous import RendezvousHandler

from tests.conftest import ROOT

PACKAGE = ROOT / "mindspeed_mm_dit"
ELSEWHERE = ("models/", "framework/mindspore/")
"""Rooms in which layers stand: the shapes on the lines of ``forward`` say more."""


def classes() -> dict[Path, list[ast.ClassDef]]:
    trees = {path.relative_to(PACKAGE): ast.parse(path.read_text("utf-8")) for path in PACKAGE.rglob("*.py")}
    return {path: [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)] for path, tree in trees.items()}


def methods(of: ast.ClassDef) -> list[ast.FunctionDef]:
    return [n for n in of.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")]


def test_every_public_method_is_explained_once():
    found = classes()
    everywhere = [each for own in found.values() for each in own]
    bases = {ast.unparse(base).partition("[")[0] for each in everywhere for base in each.bases}
    protocols = {each.name for each in everywhere if "Protocol" in map(ast.unparse, each.bases)}
    told = {
        method.name for each in everywhere if each.name in bases | protocols
        for method in methods(each) if ast.get_docstring(method)
    }  # fmt: skip
    told |= set(dir(RendezvousHandler))
    silent = [
        f"{path}: {each.name}.{method.name}"
        for path, own in found.items() if not str(path).startswith(ELSEWHERE)
        for each in own if not each.name.startswith("_")
        for method in methods(each) if not ast.get_docstring(method) and method.name not in told
    ]  # fmt: skip
    assert silent == []
