"""The page that ``mm-dit compare`` writes: one HTML file with its pictures inside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mindspeed_mm_dit.pages import embed, folded, image, table, write_page
from mindspeed_mm_dit.verify.compare import CHECKS, first_past, verdict
from mindspeed_mm_dit.verify.processes import Training
from mindspeed_mm_dit.verify.table import Finding

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AMPLIFIED = (
    "A high learning rate amplifies rounding from step to step. Compare again with a smaller --lr in the file of "
    "--train-args: rounding then stays within the tolerance, and a fault of the optimizer does not."
)
_SECTIONS = {
    "forward": ("Forward, layer by layer", "layer, in order of execution"),
    "gradients": ("Gradients, parameter by parameter", "parameter, worst first"),
}


@dataclass(frozen=True)
class Samples:
    """The same images drawn by both sides."""

    images: tuple[bytes, bytes]
    """A PNG of each side's."""
    largest_difference: int
    """Of a pixel, in levels of 0 ... 255."""
    changed: float
    """Part of the pixels that differ at all."""
    how: str
    """Sampler, steps, guidance."""


@dataclass(frozen=True)
class Comparison:
    """All that was compared."""

    labels: tuple[str, str]
    """What the sides are called; the first is the reference."""
    facts: tuple[dict[str, str], dict[str, str]]
    """Versions and device of each."""
    about: dict[str, str]
    """What was compared: model, checkpoint, seed, flags."""
    findings: dict[str, list[Finding]]
    """By the line of the verdict."""
    training: Sequence[Training]
    """Of each side; empty: none."""
    speeds: Sequence[float]
    """Training images per second of each side."""
    samples: Samples | None

    @cached_property
    def checks(self) -> dict[str, Finding]:
        """Of each line of the verdict, the quantity to look at."""
        return verdict(self.findings)

    @property
    def good(self) -> bool:
        """The verdict."""
        return all(check.good for check in self.checks.values())

    @property
    def culprit(self) -> Finding | None:
        """The first layer past tolerance, if there is one."""
        return first_past(self.findings["forward"])

    @property
    def note(self) -> str:
        """What to make of losses that part while all else agrees."""
        return AMPLIFIED if [name for name, check in self.checks.items() if not check.good] == ["training"] else ""


def write_report(path: Path, comparison: Comparison) -> None:
    """Write ``comparison`` to ``path``."""
    c, word = comparison, "PASS" if comparison.good else "FAIL"
    title = f"{c.labels[1]} against {c.labels[0]}"
    names = list(dict.fromkeys([*c.facts[0], *c.facts[1]]))
    parts = [
        f"<h1>{escape(title)}: <span class={word}>{word}</span></h1>",
        f"<p>{datetime.now():%Y-%m-%d %H:%M}. Error is the norm of the difference over the norm of the reference, "
        f"{escape(c.labels[0])}.</p>",
        table(("", ""), list(c.about.items())),
        "<h2>Verdict</h2>", table(("check", "error", "where", "tolerance", "verdict"), verdict_rows(c),
                                  [not check.good for check in c.checks.values()]),
        *(f"<p><b>Why {check.tolerance:.0e} for {name}.</b> {escape(CHECKS[name].why)}</p>"
          for name, check in c.checks.items()),
        *_section(c, "forward"), *_section(c, "gradients"), *_training(c), *_samples(c),
        "<h2>Versions</h2>",
        table(("", *c.labels), [(name, *(facts.get(name, "-") for facts in c.facts)) for name in names]),
    ]  # fmt: skip
    write_page(path, title, parts)


def verdict_rows(c: Comparison) -> list[tuple[str, ...]]:
    """Return the lines of the verdict: check, error, where, tolerance, PASS or FAIL."""
    return [
        (name, f"{check.error:.2e}", check.name, f"{check.tolerance:.0e}", "PASS" if check.good else "FAIL")
        for name, check in c.checks.items()
    ]


def _section(c: Comparison, name: str) -> list[str]:
    """Return a picture and a table of all findings of one line of the verdict."""
    (title, head), found, is_forward = _SECTIONS[name], c.findings[name], name == "forward"
    ordered = found if is_forward else sorted(found, key=lambda finding: -finding.error)
    columns = ("error of its inputs", "error of its output") if is_forward else ("norm", "error")
    rows = [(f.name, f"{f.input_error:.2e}" if is_forward else f"{f.reference:.3e}", f"{f.error:.2e}") for f in ordered]
    bad = [finding == c.culprit if is_forward else not finding.good for finding in ordered]
    said = []
    if is_forward and c.culprit:
        said = [f"<p>First layer past tolerance: <code class=FAIL>{escape(c.culprit.name)}</code>. Its inputs differ "
                f"by {c.culprit.input_error:.1e}, its output by {c.culprit.error:.1e}.</p>"]  # fmt: skip
    elif is_forward:
        said = ["<p>No layer is past tolerance.</p>"]
    what = "layers" if is_forward else "parameters"
    folded_table = folded(f"all {len(rows)} {what}", table((head, *columns), rows, bad))
    return [f"<h2>{title}</h2>", *said, image(_error_figure(found)), folded_table]


def _training(c: Comparison) -> list[str]:
    if not c.training:
        return []
    rows = [
        (finding.name, *(f"{side.losses.get(number, float('nan')):.6e}" for side in c.training), f"{finding.error:.1e}")
        for finding, number in zip(c.findings["training"], c.training[0].losses)
    ]
    return [
        f"<h2>The first {len(rows)} steps of training</h2>", *([f"<p>Note: {escape(c.note)}</p>"] if c.note else []),
        image(_loss_figure(c)),
        folded("every step", table(("", *c.labels, "relative difference"), rows)),
        "<h2>Speed</h2>", table(("", "training images/s (median of the second half of the steps)"),
                                [(label, f"{speed:.1f}") for label, speed in zip(c.labels, c.speeds)]),
    ]  # fmt: skip


def _samples(c: Comparison) -> list[str]:
    if c.samples is None:
        return []
    figures = "".join(
        f"<figure>{embed(png, label)}<figcaption>{escape(label)}</figcaption></figure>"
        for label, png in zip(c.labels, c.samples.images)
    )
    return [
        "<h2>Samples, same weights and noise</h2>",
        f"<p>{escape(c.samples.how)}. Largest difference of a pixel: {c.samples.largest_difference} of 255; "
        f"{c.samples.changed:.2%} of the pixels differ. Not part of the verdict: rounding alone can move a pixel by a "
        "level.</p>",
        figures,
    ]


# --- figures ---------------------------------------------------------------------------------------------


def _figure(height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(10, height), dpi=100, layout="constrained")


def _error_figure(findings: Sequence[Finding]) -> Figure:
    """Draw errors on a logarithmic axis against the tolerance; those that are 0 or infinite sit at its ends."""
    figure, tolerance = _figure(4.2), findings[0].tolerance
    axes: Any = figure.subplots()
    values, places = _clipped(findings), np.arange(len(findings))
    axes.bar(places, values, color=np.where(values > tolerance, "tab:red", "tab:blue"), width=0.8)
    axes.axhline(tolerance, color="0.3", linestyle="--", linewidth=1, label=f"tolerance {tolerance:.0e}")
    axes.set(ylabel="relative error", yscale="log", ylim=(1e-9, max(10 * tolerance, 2 * values.max())))
    shown = places[:: max(1, len(places) // 45)]
    axes.set_xticks(shown, [findings[i].name for i in shown], rotation=90, fontsize=7)
    axes.legend()
    return figure


def _loss_figure(c: Comparison) -> Figure:
    figure, findings = _figure(5.0), c.findings["training"]
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    for label, side, style in zip(c.labels, c.training, ("-", "--")):
        above.plot(list(side.losses), list(side.losses.values()), style, label=label, linewidth=2)
    above.set(ylabel="loss")
    above.legend()
    below.plot(list(c.training[0].losses), _clipped(findings), "o-", markersize=3)
    below.axhline(findings[0].tolerance, color="0.3", linestyle="--", linewidth=1)
    below.set(xlabel="step", ylabel="relative difference", yscale="log")
    return figure


def _clipped(findings: Sequence[Finding]) -> np.ndarray:
    return np.clip(np.array([finding.error for finding in findings]), 1e-9, 1e3)
