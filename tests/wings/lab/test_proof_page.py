"""The page of ``mm-dit prove``: what it says of layouts that are right, wrong, and not proved."""

from __future__ import annotations

import json
from types import SimpleNamespace

from mindspeed_mm_dit.wings.lab.layouts import Layout
from mindspeed_mm_dit.wings.lab.page import said, write_proof
from mindspeed_mm_dit.wings.lab.prove import Crashed, Verdict
from mindspeed_mm_dit.wings.lab.table import Finding

ABOUT = {"config": "mine", "model": "whole: 1,234 parameters", "data": "<b>digits</b>"}
RIGHT = [Finding("loss/1", 1e-8, 1e-6), Finding("loss/2", 1e-7, 1e-6), Finding("gradient/w", 2e-7, 4e-7, 1.0, 1.0)]
WRONG = [*RIGHT[:2], Finding("gradient/w", 1e-2, 4e-7, 1.0, 1.0)]
VERDICTS = [
    Verdict(Layout("whole batch"), RIGHT),
    Verdict(Layout("FSDP2", 2), WRONG, where="backward: module blocks.0"),
    Verdict(Layout("hybrid", 4), reason=Crashed("its process crashed: bang")),
    Verdict(Layout("Ulysses", 2), reason="<this> predictor computes a sample on one rank"),
]


def write(tmp_path, verdicts, framework):
    config = SimpleNamespace(about=ABOUT, samples=16, flags=["--lr", "1e-3"])
    write_proof(tmp_path / "new" / "proof.html", config, verdicts)
    return (tmp_path / "new" / "proof.html").read_text(), json.loads((tmp_path / "new" / "proof.json").read_text())


def test_a_page_says_what_is_wrong_first_and_holds_every_quantity(tmp_path, framework):
    page, found = write(tmp_path, VERDICTS, framework)
    assert "<p class=FAIL>1 of 4 layouts are right, 2 wrong, 1 not proved</p>" in page
    wrong = "2 ranks, FSDP2: backward: module blocks.0; furthest past its bound: gradient/w, error 1.0e-02"
    assert page.index(wrong) < page.index("<h2>") and page.index("its process crashed: bang") < page.index("<h2>")
    assert "<td class=n>2.0e-07 (0.50)</td>" in page and page.count("<tr class=bad>") == 2
    assert "&lt;this&gt; predictor" in page and "&lt;b&gt;digits" in page and "http" not in page
    assert "step 2" in page and page.count("<details>") == 2 and page.count("data:image/png;base64,") == 1
    assert [each["verdict"] for each in found["layouts"]] == ["PASS", "FAIL", "FAIL", "not proved"]
    assert found["about"]["flags"] == "--lr 1e-3" and found["layouts"][1]["quantities"][2]["good"] is False


def test_a_page_of_what_cannot_be_proved_has_no_table_of_errors(tmp_path, framework):
    page, _ = write(tmp_path, VERDICTS[3:], framework)
    assert "0 of 1 layouts are right, 1 not proved" in page and "<img" not in page and "Not proved" in page


def test_the_terminal_has_a_line_for_each_layout():
    lines = said(VERDICTS).splitlines()
    assert len(lines) == 5 and lines[0].startswith("1 rank, whole batch")
    assert "PASS        nearest to its bound: gradient/w, error 2.0e-07, bound 4.0e-07" in lines[0]


def test_what_rounding_is_larger_than_is_not_proved_and_a_dash(tmp_path, framework):
    lost = [Finding("step/w", 0.9, 1.5, 1.0, 1.0), Finding("average/w", 1.0, 1.0, 1.0, 1.0)]
    layout = Layout("autocast", precision="bfloat16")
    some, none = Verdict(layout, [*RIGHT, *lost]), Verdict(layout, lost)
    assert (some.word, none.word, Verdict(layout, [Finding("step/w", 2.0, 1.5)]).word) == ("PASS", "not proved", "FAIL")
    assert "rounding in bfloat16 is larger than 2 of 5 quantities" in said([some])
    page, found = write(tmp_path, [some], framework)
    assert "<td>step/w</td><td class=n>1.000e+00</td><td>-</td><td>-</td>" in page
    assert [each["good"] for each in found["layouts"][0]["quantities"]] == [True, True, True, "-", "-"]
