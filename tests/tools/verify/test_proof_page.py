"""The page of ``mm-dit prove``: what it says of layouts that are right, wrong, and not proved."""

import json
from types import SimpleNamespace

from mindspeed_mm_dit.tools.verify.page import write_proof
from mindspeed_mm_dit.tools.verify.prove import Crashed, Layout, Verdict
from mindspeed_mm_dit.tools.verify.table import Finding

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


def test_page_escapes_words_and_holds_every_quantity(tmp_path, framework):
    page, found = write(tmp_path, VERDICTS, framework)
    assert page.index("gradient/w, error 1.0e-02") < page.index("<h2>") and page.count("<tr class=bad>") == 2
    assert "&lt;this&gt; predictor" in page and "&lt;b&gt;digits" in page and "http" not in page
    assert [each["verdict"] for each in found["layouts"]] == ["PASS", "FAIL", "FAIL", "not proved"]
    assert found["about"]["flags"] == "--lr 1e-3" and found["layouts"][1]["quantities"][2]["good"] is False
    write(tmp_path, VERDICTS[3:], framework)


def test_quantity_smaller_than_rounding_is_not_proved(tmp_path, framework):
    lost = [Finding("step/w", 0.9, 1.5, 1.0, 1.0), Finding("average/w", 1.0, 1.0, 1.0, 1.0)]
    layout = Layout("autocast", precision="bfloat16")
    some, none = Verdict(layout, [*RIGHT, *lost]), Verdict(layout, lost)
    assert (some.word, none.word, Verdict(layout, [Finding("step/w", 2.0, 1.5)]).word) == ("PASS", "not proved", "FAIL")
    _, found = write(tmp_path, [some], framework)
    assert [each["good"] for each in found["layouts"][0]["quantities"]] == [True, True, True, "-", "-"]
