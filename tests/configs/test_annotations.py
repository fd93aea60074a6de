"""Annotations are read back from their text, which Python 3.10 does not do for all that later ones take."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "mindspeed_mm_dit"


@pytest.mark.extended
def test_no_class_variable_is_without_its_type():
    plain = [
        f"{file.relative_to(PACKAGE)}:{node.lineno}"
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation).rpartition(".")[2] == "ClassVar"
    ]
    assert not plain, f"Python 3.10 refuses a plain ClassVar: {', '.join(plain)}"
