"""What ``mm-dit prove`` says: lines for the terminal, one HTML page, and the same as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit import __version__
from mindspeed_mm_dit.pages import png_of_figure, write
from mindspeed_mm_dit.verify.proof import Config
from mindspeed_mm_dit.verify.prove import MEASURED, PROVED, Verdict
from mindspeed_mm_dit.verify.published import LOGGED, Published, row_of
from mindspeed_mm_dit.verify.table import Finding, worst
from mindspeed_mm_dit.verify.worker import facts as versions


def said(verdicts: Sequence[Verdict]) -> str:
    """Return a line for each layout, and the verdict."""
    wide = max(len(str(verdict.layout)) for verdict in verdicts)
    return "\n".join([*(f"{str(v.layout).ljust(wide)}  {v.word:10}  {_why(v)}" for v in verdicts), _summary(verdicts)])


def write_proof(path: Path, config: Config, verdicts: Sequence[Verdict]) -> None:
    """Write the page ``path``, and the same as .json beside it."""
    proved = [verdict for verdict in verdicts if not verdict.reason]
    losses = proved[0].of_kind("loss") if proved else []
    about = {**config.about, "samples": str(config.samples), "flags": " ".join(config.flags)}
    _write(
        path, "proof.html", about, {"layouts": list(map(_json, verdicts))}, MEASURED.why,
        title="Is the training step right?", summary=_summary(verdicts), about=config.about["model"],
        wrong=[f"{v.layout}: {_why(v)}" for v in verdicts if v.word == "FAIL"],
        heads=("ranks", "layout", "verdict", *PROVED), bad=[v.word == "FAIL" for v in proved],
        rows=[(*_names(v), v.word, *(_cell(v.of_kind(kind)) for kind in PROVED)) for v in proved],
        shares=png_of_figure(_figure(proved)) if proved else None,
        growth={
            "heads": ("ranks", "layout", *(f"step {number}" for number in range(1, 1 + len(losses)))),
            "rows": [(*_names(v), *(_cell([loss]) for loss in v.of_kind("loss"))) for v in proved],
        } if len(losses) > 1 else None,
        unproved=[(*_names(v), v.reason) for v in verdicts if v.reason],
        each=[(str(v.layout), list(map(_row, v.findings)), [not f.good for f in v.findings]) for v in proved],
    )  # fmt: skip


def write_proof_of_run(
    path: Path, run: Published, findings: Sequence[Finding], about: Mapping[str, str], others: Sequence[str]
) -> None:
    """Write the page and the .json of the steps of a published run; about, others: what is said of it, and of here."""
    wrong = [finding for finding in findings if not finding.good]
    named = {"run": str(run.past.root if run.past else "its card"), **about}
    _write(
        path, "published.html", named, {"quantities": list(map(_as_json, findings))}, LOGGED.why,
        title="Are the steps those of the log?", about=f"{about['parameters']} parameters, {about['data']}",
        summary=f"{len(findings) - len(wrong)} of {len(findings)} numbers of the log are right",
        wrong=[", ".join(row_of(finding)) for finding in wrong], bad=[not finding.good for finding in findings],
        rows=list(map(row_of, findings)), others=others,
    )  # fmt: skip


def _write(path: Path, template: str, facts: Mapping[str, str], found: dict[str, Any], bound: str, **page: Any) -> None:
    content = {"about": facts, "versions": versions(), "bound": bound, **found}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    page |= {"when": f"{datetime.now():%Y-%m-%d %H:%M}", "version": __version__, "bound": bound}
    write(path, template, facts=[*facts.items(), *versions().items()], **page)


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


def _names(verdict: Verdict) -> tuple[str, str]:
    return str(verdict.layout.ranks), verdict.layout.label


def _cell(findings: Sequence[Finding]) -> str:
    found = worst(findings) if findings else None
    return f"{found.error:.1e} ({found.error / found.tolerance:.2f})" if found else "-"


def _row(f: Finding) -> tuple[str, ...]:
    return f.name, f"{f.reference:.3e}", f"{f.error:.1e}", f"{f.tolerance:.1e}"


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


def _json(v: Verdict) -> dict[str, Any]:
    quantities = list(map(_as_json, v.findings))
    return {"layout": str(v.layout), "verdict": v.word, "reason": v.reason, "where": v.place, "named": v.named,
            "quantities": quantities}  # fmt: skip


def _as_json(f: Finding) -> dict[str, Any]:
    return {"name": f.name, "norm": f.reference, "error": str(f.error), "bound": f.tolerance, "good": f.good}
