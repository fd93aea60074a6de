"""`make test` runs on MindSpore what is written for MindSpore."""

from __future__ import annotations

import re

from tests.conftest import ROOT

ASKS = re.compile(r'FRAMEWORK (?:!= "mindspore"|==)|^def test_\w+\((?:.*, )?mindspore[,)]', re.MULTILINE)
"""A test that MindSpore alone runs, or that runs in another way on each framework."""


def test_each_file_with_tests_for_mindspore_is_run_with_it():
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", "")
    commands = re.findall(r"^(?:SEAM_TESTS :=|\tMM_DIT_TEST_FRAMEWORK=mindspore) .*", makefile, re.MULTILINE)
    named = [ROOT / place for place in re.findall(r"\btests/\S+", " ".join(commands))]
    written = [file for file in (ROOT / "tests").rglob("test_*.py") if ASKS.search(file.read_text())]
    assert written and not [file for file in written if not {file, *file.parents} & set(named)]
