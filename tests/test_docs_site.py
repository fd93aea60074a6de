"""The site of docs/: its reference names every flag, key and command; make docs holds it to its links."""

from __future__ import annotations

import importlib.util
import json
import re

import pytest

from mindspeed_mm_dit.cli.commands import COMMANDS
from mindspeed_mm_dit.cli.main import command_parser
from mindspeed_mm_dit.configs.embedded import config_folder, embedded_configs
from mindspeed_mm_dit.configs.run import rows
from tests.conftest import FRAMEWORK, ROOT

pytest.importorskip("griffe", reason="of requirements/docs.txt")
pytestmark = pytest.mark.skipif(FRAMEWORK != "pytorch", reason="of the docs' own environment")


@pytest.fixture(scope="module")
def pages():
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "docs/site.py")
    site = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(site)
    return site.generated()


def first_cells(text: str) -> dict[str, str]:
    """What a table calls its rows -> the row."""
    return {line.split("`")[1]: line for line in text.splitlines() if line.startswith("| `")}


def test_the_reference_has_every_flag_of_a_run_with_its_meaning(pages):
    there = first_cells(pages["reference/flags.md"])
    assert [row.word for row in rows() if row.word not in there] == []
    assert "in bfloat16" in there["--bf16"] and "`model.bf16`" in there["--bf16"]
    assert "| `0.0` |" in there["--min-lr"] and "| required |" in there["--lr"]


def test_the_reference_has_every_flag_of_every_command(pages):
    sections = dict(zip(COMMANDS, pages["reference/commands.md"].split("\n## ")[1:], strict=True))
    for name, text in sections.items():
        flags = [word for action in command_parser(name)._actions for word in action.option_strings[:1] if word != "-h"]
        assert text.startswith(f"mm-dit {name}\n") and [word for word in flags if word not in first_cells(text)] == []


def test_the_reference_has_every_key_of_the_embedded_configs_with_a_meaning(pages):
    text = pages["reference/keys.md"]
    known = first_cells(text)
    for name in embedded_configs():
        for file in ("model.json", "data.json"):
            content = json.loads((config_folder(name) / file).read_text())
            sections = [one for one in content.values() if isinstance(one, dict)]
            assert [key for section in sections for key in section if key not in known] == []
    assert re.findall(r"\|\s+\|$", text, re.M) == []  # no key without a meaning


def test_a_page_from_beside_docs_links_within_the_site(pages):
    assert "](own_images.md)" in pages["index.md"] and "](docs/" not in "".join(pages.values())
