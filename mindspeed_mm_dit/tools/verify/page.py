"""The output of ``mm-dit prove`` and ``compare``: lines for the terminal, one HTML page, and the same as JSON."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit import __version__
from mindspeed_mm_dit.pages import write
from mindspeed_mm_dit.tools.verify.past_run import LOGGED, PublishedRun, row_of
from mindspeed_mm_dit.tools.verify.processes import facts as versions
from mindspeed_mm_dit.tools.verify.proof import Config
from mindspeed_mm_dit.tools.verify.prove import MEASURED, PROVED, Verdict
from mindspeed_mm_dit.tools.verify.table import Finding, worst


def proof_lines(verdicts: Sequence[Verdict]) -> str:
    """Return a line for each layout, and the overall verdict."""
    wide = max(len(str(verdict.layout)) for verdict in verdicts)
    return "\n".join([*(f"{str(v.layout).ljust(wide)}  {v.word:10}  {_why(v)}" for v in verdicts), _summary(verdicts)])


def write_proof(path: Path, config: Config, verdicts: Sequence[Verdict]) -> None:
    """Write the HTML page ``path``, and the same as .json next to it."""
    proved = [verdict for verdict in verdicts if not verdict.reason]
    losses = proved[0].of_kind("loss") if proved else []
    about = {**config.about, "samples": str(config.samples), "flags": " ".join(config.flags)}
    _write(
        path,
        "proof.html",
        {**about, **versions()},
        {"layouts": list(map(_json, verdicts))},
        [MEASURED.why],
        title="Is the training step right?",
        summary=_summary(verdicts),
        about=f"Model: {config.about['model']}",
        wrong=[f"{v.layout}: {_why(v)}" for v in verdicts if v.word == "FAIL"],
        heads=("ranks", "layout", "verdict", *PROVED),
        bad=[v.word == "FAIL" for v in proved],
        rows=[(*_names(v), v.word, *(_cell(v.of_kind(kind)) for kind in PROVED)) for v in proved],
        error_plot=_errors_by_layout({str(v.layout): v.findings for v in proved}),
        growth={
            "heads": ("ranks", "layout", *(f"step {number}" for number in range(1, 1 + len(losses)))),
            "rows": [(*_names(v), *(_cell([loss]) for loss in v.of_kind("loss"))) for v in proved],
        }
        if len(losses) > 1
        else None,
        unproved=[(*_names(v), _why(v)) for v in verdicts if v.reason or not v.conclusive],
        each=[_folded(f"{v.layout}: every quantity", v.findings) for v in proved],
    )


def write_proof_of_run(
    path: Path, run: PublishedRun, findings: Sequence[Finding], about: Mapping[str, str], others: Sequence[str]
) -> None:
    """Write the page and the .json about steps of a published run.

    about: facts about the run; others: versions that differ here.
    """
    wrong = [finding for finding in findings if not finding.good]
    named = {"run": str(run.past.root if run.past else "its card"), **about, **versions()}
    _write(
        path,
        "published.html",
        named,
        {"quantities": list(map(_as_json, findings))},
        [LOGGED.why],
        title="Do the recomputed steps match the log?",
        about=f"{about['parameters']} parameters, {about['data']}",
        summary=f"{len(findings) - len(wrong)} of {len(findings)} numbers of the log are right",
        wrong=[", ".join(row_of(finding)) for finding in wrong],
        bad=[not finding.good for finding in findings],
        rows=list(map(row_of, findings)),
        others=others,
    )


def write_comparison(path: Path, c: Any) -> None:
    """Write the page and the .json of ``c``, a Comparison."""
    sides = {f"{label}: {name}": fact for label, facts in zip(c.labels, c.facts) for name, fact in facts.items()}
    speeds = {f"{label}: training": f"{speed:.1f} images/s" for label, speed in zip(c.labels, c.speeds)}
    judged = [finding for findings in c.kinds.values() for finding in findings]
    _write(
        path,
        "comparison.html",
        {**c.about, **speeds, **sides},
        {"quantities": list(map(_as_json, judged))},
        list(dict.fromkeys(c.bounds[kind].why for kind in c.kinds)),
        title=f"{c.labels[1]} against {c.labels[0]}",
        about=f"Model: {c.about['model']}",
        c=c,
        summary="PASS" if c.good else "FAIL",
        wrong=[line for line in (c.where, c.note) if line and not c.good],
        heads=("check", "error", "where", "bound", "verdict"),
        rows=check_rows(c),
        bad=[not check.good for check in c.checks.values()],
        error_plot=_errors_by_depth([*c.watched, *judged]),
        growth=None,
        unproved=(),
        each=[_folded(f"{kind}: every quantity", findings) for kind, findings in c.kinds.items()],
    )


def comparison_lines(c: Any) -> str:
    """Return a line for each check of a Comparison, where the sides differ, and the verdict."""
    lines = [
        f"{word}  {check:13} error {error}, bound {bound}: {where}"
        for check, error, where, bound, word in check_rows(c)
    ]
    lines += [f"first difference: {c.where}"] if c.where else []
    lines += [f"steps compared: {c.about['steps']}"] if " of " in c.about.get("steps", "") else []
    lines += [f"in float64: {c.about['in float64']}"] if "in float64" in c.about else []
    lines += [f"note: {c.note}"] if c.note else []
    if c.speeds:
        speeds = ", ".join(f"{label} {speed:.1f} images/s" for label, speed in zip(c.labels, c.speeds))
        lines.append(f"training: {speeds}")
    if c.samples is not None:
        lines.append(f"samples: largest difference of a pixel {c.samples.largest_difference} of 255")
    return "\n".join([*lines, f"verdict: {'PASS' if c.good else 'FAIL'}"])


def check_rows(c: Any) -> list[tuple[str, ...]]:
    """Return the rows of the verdict: check, error, where, bound, PASS or FAIL."""
    return [
        (kind, f"{check.error:.2e}", check.name, f"{check.tolerance:.1e}", "PASS" if check.good else "FAIL")
        for kind, check in c.checks.items()
    ]


def _write(
    path: Path, template: str, facts: Mapping[str, str], results: dict[str, Any], bounds: Sequence[str], **page: Any
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"about": facts, "bounds": bounds, **results}
    path.with_suffix(".json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    page |= {"when": f"{datetime.now():%Y-%m-%d %H:%M}", "version": __version__, "bounds": bounds}
    write(path, template, facts=list(facts.items()), **page)


def _summary(verdicts: Sequence[Verdict]) -> str:
    words = [verdict.word for verdict in verdicts]
    counts = [f"{words.count('PASS')} of {len(words)} layouts are right"]
    counts += [f"{words.count('FAIL')} wrong"] if "FAIL" in words else []
    counts += [f"{words.count('not proved')} not proved"] if "not proved" in words else []
    return ", ".join(counts)


def _why(verdict: Verdict) -> str:
    if verdict.reason:
        return verdict.reason
    if verdict.word == "FAIL":
        finding = next(finding for finding in verdict.findings if finding.name == verdict.named)
        where = f"{verdict.location}; furthest past its bound: " if verdict.where else ""
        return f"{where}{finding.name}, error {finding.error:.1e}, bound {finding.tolerance:.1e}"
    rest = len(verdict.findings) - len(verdict.conclusive)
    inconclusive = f"rounding in {verdict.layout.precision} is larger than {rest} of {len(verdict.findings)} quantities"
    if verdict.word == "not proved":
        return inconclusive
    finding = worst(verdict.conclusive)
    nearest = f"nearest to its bound: {finding.name}, error {finding.error:.1e}, bound {finding.tolerance:.1e}"
    return f"{nearest}; not proved: {inconclusive}" if rest else nearest


def _names(verdict: Verdict) -> tuple[str, str]:
    return str(verdict.layout.ranks), verdict.layout.label


def _cell(findings: Sequence[Finding]) -> str:
    if not (conclusive := [finding for finding in findings if finding.is_conclusive]):
        return "-"
    fraction = worst(conclusive).error / worst(conclusive).tolerance
    return f"{worst(conclusive).error:.1e} ({fraction:.{0 if fraction > 9 else 2}f})"


def _folded(name: str, findings: Sequence[Finding]) -> tuple[str, list[tuple[str, ...]], list[bool]]:
    rows: list[tuple[str, ...]] = [
        (f.name, f"{f.reference:.3e}", *((f"{f.error:.1e}", f"{f.tolerance:.1e}") if f.is_conclusive else ("-", "-")))
        for f in findings
    ]
    return name, rows, [not f.good for f in findings]


def _errors_by_depth(findings: Sequence[Finding]) -> bytes | None:
    """Plot every quantity's error as a fraction of its bound, from the first module to the last; return a PNG."""
    conclusive = [finding for finding in findings if finding.is_conclusive and math.isfinite(finding.tolerance)]
    if not conclusive:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), dpi=100, layout="constrained")
    axes: Any = figure.subplots()
    for kind in dict.fromkeys(finding.kind for finding in conclusive):
        findings_of_kind = [finding for finding in conclusive if finding.kind == kind]
        fractions = np.clip([f.error / f.tolerance if f.tolerance else f.error for f in findings_of_kind], 1e-4, 1e4)
        ends = (1, 0) if kind in ("given", "back") else (0, 1)  # (computed from the last module to the first)
        axes.scatter(np.linspace(*ends, len(findings_of_kind)), fractions, s=12, alpha=0.6, linewidths=0, label=kind)
    axes.axhline(1, color="0.3", linestyle="--", linewidth=1)
    axes.set(yscale="log", ylabel="error, as a fraction of its bound", xlabel="from the first module to the last")
    figure.legend(loc="outside upper center", ncols=8, fontsize=8)
    return _png(figure)


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _errors_by_layout(rows: Mapping[str, Sequence[Finding]]) -> bytes | None:
    """Plot every quantity's error as a fraction of its bound, one row per layout or kind; return a PNG."""
    from matplotlib.figure import Figure

    if not rows:
        return None
    figure = Figure(figsize=(10, 0.8 + 0.32 * len(rows)), dpi=100, layout="constrained")
    axes: Any = figure.subplots()
    for row, findings in enumerate(rows.values()):
        fractions = np.clip([f.error / f.tolerance for f in findings if f.is_conclusive], 1e-4, 1e4)
        colours = np.where(fractions > 1, "tab:red", "tab:blue")
        axes.scatter(fractions, np.full(len(fractions), row), s=9, alpha=0.4, linewidths=0, c=colours)
    axes.axvline(1, color="0.3", linestyle="--", linewidth=1)
    axes.set(xscale="log", xlabel="error, as a fraction of its bound", xlim=(0.5e-4, max(10.0, axes.get_xlim()[1])))
    axes.set_yticks(range(len(rows)), list(rows), fontsize=8)
    axes.invert_yaxis()
    return _png(figure)


def _json(v: Verdict) -> dict[str, Any]:
    facts = {"layout": str(v.layout), "verdict": v.word, "reason": v.reason, "where": v.location, "named": v.named}
    return {**facts, "quantities": list(map(_as_json, v.findings))}


def _as_json(f: Finding) -> dict[str, Any]:
    good = f.good if f.is_conclusive else "-"  # (neither: not proved)
    return {"name": f.name, "norm": f.reference, "error": str(f.error), "bound": f.tolerance, "good": good}
