"""Parts that are known by name, whoever brings them; and names in the package, which say what they hold."""

import ast
import importlib
import sys

import pytest

from mindspeed_mm_dit import parts, registry
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.registry import Registry, register
from tests.conftest import ROOT


@pytest.fixture
def colours(monkeypatch):
    """A kind of part that nobody else has."""
    monkeypatch.setitem(registry._RECORDS, "colour", {})
    monkeypatch.setitem(parts.ENTRIES, "colour", {})
    return Registry[object]("colour")


@pytest.mark.parametrize("kind", parts.ENTRIES)
def test_our_parts_are_where_we_say(kind):
    for place in parts.ENTRIES[kind].values():
        module, _, name = place.partition(":")
        assert hasattr(importlib.import_module(module), name), place


def test_a_place_is_imported_when_the_part_is_first_asked_for(colours, monkeypatch):
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    register("colour", "hue", "colorsys:rgb_to_hsv")
    assert list(colours) == ["hue"] and "hue" in colours and "colorsys" not in sys.modules
    assert colours["hue"] is importlib.import_module("colorsys").rgb_to_hsv
    assert "red" not in colours and len(colours) == 1 and colours.get("red") is None


def test_a_name_is_taken_once_and_the_same_part_may_join_again(colours):
    for _ in range(2):
        register("colour", "hue", "colorsys:rgb_to_hsv")
    register("colour", "hue", importlib.import_module("colorsys").rgb_to_hsv)
    with pytest.raises(ConfigError, match="colour 'hue'"):
        register("colour", "hue", "colorsys:hsv_to_rgb")
    with pytest.raises(ConfigError, match=r"(?s)'predictr', 'mine'.*'predictor'"):
        register("predictr", "mine", "my_package:MineConfig")


def test_networks_are_built_by_name_under_mindspeed_mms_name_of_the_table(framework):
    from mindspeed_mm_dit.models.registry import PREDICTOR_CONFIGS, PREDICTOR_MODEL_MAPPINGS

    config = PREDICTOR_CONFIGS["dit"](input_size=8, num_classes=3, hidden_size=16, num_layers=1, num_heads=2)
    assert type(PREDICTOR_MODEL_MAPPINGS["dit"](config)).__name__ == "DiT"
    assert {"dit", "custom_dit", "wan"} <= set(PREDICTOR_MODEL_MAPPINGS) and "nothing" not in PREDICTOR_MODEL_MAPPINGS


BANNED = {"own", "said", "told", "asked", "sought", "wanted", "taken", "kept", "place", "beside"}
RARE, MOST = {"found", "given", "seen"}, 100


def test_package_avoids_vague_identifiers():
    rare = 0
    for path in sorted((ROOT / "mindspeed_mm_dit").rglob("*.py")):
        nodes = ast.walk(ast.parse(path.read_text()))
        names = [getattr(node, field, None) for node in nodes for field in ("id", "name", "arg", "attr")]
        words = [name for name in names if isinstance(name, str)]
        assert not BANNED.intersection(words), path
        rare += sum(word in RARE for word in words)
    assert rare <= MOST
