"""What ``mm-dit prove`` says: lines for the terminal, one HTML page, and the same as JSON."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit import __version__
from mindspeed_mm_dit.pages import folded, image, table, write_page
from mindspeed_mm_dit.verify.proof import Config
from mindspeed_mm_dit.verify.prove import KINDS, MEASURED, Verdict
from mindspeed_mm_dit.verify.table import Finding, worst

HEADS = ("ranks", "layout", "verdict", *KINDS)


def said(verdicts: Sequence[Verdict]) -> str:
    """Return a line for each layout, and the verdict."""
    wide = max(len(str(verdict.layout)) for verdict in verdicts)
    return "\n".join([*(f"{str(v.layout).ljust(wide)}  {v.word:10}  {_why(v)}" for v in verdicts), _summary(verdicts)])


def write_proof(path: Path, config: Config, verdicts: Sequence[Verdict]) -> None:
    """Write the page ``path``, and the same as .json beside it."""
    facts = {**config.about, "samples": str(config.samples), "flags": " ".join(config.flags)}
    versions = _versions()
    path.with_suffix(".json").write_text(json.dumps(_json(facts, versions, verdicts), indent=1), encoding="utf-8")
    wrong = [verdict for verdict in verdicts if verdict.word == "FAIL"]
    unproved = [verdict for verdict in verdicts if verdict.reason]
    proved = [verdict for verdict in verdicts if not verdict.reason]
    word = "FAIL" if wrong else "PASS"
    parts = [
        "<h1>Is the training step right?</h1>",
        f"<p class={word}>{escape(_summary(verdicts))}</p>",
        f"<p>{datetime.now():%Y-%m-%d %H:%M}, mm-dit {__version__}. {escape(config.about['model'])}.</p>",
        *(f"<p class=FAIL>{escape(str(v.layout))}: {escape(_why(v))}</p>" for v in wrong),
        "<h2>Every layout against float64</h2>",
        "<p>The largest relative error of each kind of quantity, and in brackets how much of its bound that is. "
        "1 is the bound: what lies below it is rounding.</p>",
        table(HEADS, [_row(v) for v in proved], [v.word == "FAIL" for v in proved]),
        *([image(_figure(proved))] if proved else []),
        f"<p><b>Where the bounds come from.</b> {escape(MEASURED.why)}</p>",
        *_growth(proved), *_unproved(unproved),
        *(folded(f"{v.layout}: every quantity", table(("quantity", "norm", "error", "bound"), _rows(v),
                                                        [not f.good for f in v.findings])) for v in proved),
        "<h2>What was proved</h2>", table(("", ""), [*facts.items(), *versions.items()]),
    ]  # fmt: skip
    write_page(path, "mm-dit prove", parts)


def _summary(verdicts: Sequence[Verdict]) -> str:
    words = [verdict.word for verdict in verdicts]
    counts = [f"{words.count('PASS')} of {len(words)} layouts are right"]
    counts += [f"{words.count('FAIL')} wrong"] if "FAIL" in words else []
    counts += [f"{words.count('not proved')} not proved"] if "not proved" in words else []
    return ", ".join(counts)


def _why(verdict: Verdict) -> str:
    if verdict.reason:
        return verdict.reason
    if verdict.word == "PASS":
        found = worst(verdict.findings)
        return f"nearest to its bound: {found.name}, error {found.error:.1e}, bound {found.tolerance:.1e}"
    found = next(finding for finding in verdict.findings if finding.name == verdict.named)
    where = f"{verdict.place}; furthest past its bound: " if verdict.where else ""
    return f"{where}{found.name}, error {found.error:.1e}, bound {found.tolerance:.1e}"


def _row(verdict: Verdict) -> tuple[str, ...]:
    return (
        str(verdict.layout.ranks),
        verdict.layout.label,
        verdict.word,
        *(_cell(verdict.of_kind(kind)) for kind in KINDS),
    )


def _names(verdict: Verdict) -> tuple[str, str]:
    return str(verdict.layout.ranks), verdict.layout.label


def _cell(findings: Sequence[Finding]) -> str:
    if not findings:
        return "-"
    found = worst(findings)
    return f"{found.error:.1e} ({found.error / found.tolerance:.2f})"


def _rows(verdict: Verdict) -> list[tuple[str, ...]]:
    return [(f.name, f"{f.reference:.3e}", f"{f.error:.1e}", f"{f.tolerance:.1e}") for f in verdict.findings]


def _unproved(verdicts: Sequence[Verdict]) -> list[str]:
    if not verdicts:
        return []
    rows = [(*_names(verdict), verdict.reason) for verdict in verdicts]
    return ["<h2>Not proved</h2>", table(("ranks", "layout", "why"), rows)]


def _growth(verdicts: Sequence[Verdict]) -> list[str]:
    """Return how differences of the loss grow from step to step, where there are several."""
    if not verdicts or len(verdicts[0].of_kind("loss")) < 2:
        return []
    heads = ("ranks", "layout", *(f"step {number}" for number in range(1, 1 + len(verdicts[0].of_kind("loss")))))
    rows = [(*_names(v), *(_cell([finding]) for finding in v.of_kind("loss"))) for v in verdicts]
    return ["<h2>How differences of the loss grow</h2>", "<p>Each step is held to what rounding has made by then.</p>",
            table(heads, rows)]  # fmt: skip


def _figure(verdicts: Sequence[Verdict]) -> Any:
    """Draw how much of its bound every quantity takes, a row a layout."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 0.8 + 0.32 * len(verdicts)), dpi=100, layout="constrained")
    axes: Any = figure.subplots()
    for row, verdict in enumerate(verdicts):
        shares = np.clip([f.error / f.tolerance for f in verdict.findings], 1e-4, 1e4)
        axes.scatter(shares, np.full(len(shares), row), s=9, alpha=0.4, linewidths=0,
                     c=np.where(shares > 1, "tab:red", "tab:blue"))  # fmt: skip
    axes.axvline(1, color="0.3", linestyle="--", linewidth=1)
    axes.set(xscale="log", xlabel="error, as a share of its bound", xlim=(0.5e-4, max(10.0, axes.get_xlim()[1])))
    axes.set_yticks(range(len(verdicts)), [str(verdict.layout) for verdict in verdicts], fontsize=8)
    axes.invert_yaxis()
    return figure


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"mindspeed_mm_dit": __version__, "python": platform.python_version(), "system": platform.platform()}
    for package in ("torch", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _json(facts: dict[str, str], versions: dict[str, str], verdicts: Sequence[Verdict]) -> dict[str, Any]:
    return {
        "about": facts, "versions": versions, "bound": MEASURED.why,
        "layouts": [
            {
                "layout": str(v.layout), "verdict": v.word, "reason": v.reason, "where": v.place,
                "named": v.named,
                "quantities": [
                    {"name": f.name, "norm": f.reference, "error": str(f.error), "bound": f.tolerance, "good": f.good}
                    for f in v.findings
                ],
            }
            for v in verdicts
        ],
    }  # fmt: skip
