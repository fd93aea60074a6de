"""Identifiers of the package are nouns that say what they hold."""

import ast

from tests.conftest import ROOT

BANNED = {"own", "said", "told", "asked", "sought", "wanted", "taken", "kept", "place", "beside"}
RARE, MOST = {"found", "given", "seen"}, 100


def test_package_avoids_vague_identifiers():
    rare = 0
    for path in sorted((ROOT / "mindspeed_mm_dit").rglob("*.py")):
        names = [name for node in ast.walk(ast.parse(path.read_text())) for name in identifiers(node)]
        assert not BANNED.intersection(names), path
        rare += sum(name in RARE for name in names)
    assert rare <= MOST


def identifiers(node):
    names = (getattr(node, field, None) for field in ("id", "name", "arg", "attr"))
    return [name for name in names if isinstance(name, str)]
