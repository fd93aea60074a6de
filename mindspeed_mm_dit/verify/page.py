"""The page that ``mm-dit compare`` writes: one HTML file with its pictures inside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mindspeed_mm_dit.pages import png_of_figure, write
from mindspeed_mm_dit.verify.compare import first_past, verdict
from mindspeed_mm_dit.verify.processes import Training
from mindspeed_mm_dit.verify.table import BOUNDS, Finding

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AMPLIFIED = (
    "A high learning rate amplifies rounding from step to step. Compare again with a smaller --lr in the file of "
    "--train-args: rounding then stays within the tolerance, and a fault of the optimizer does not."
)


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
    """By kind: a line of the verdict each."""
    training: Sequence[Training]
    """Of each side; empty: none."""
    speeds: Sequence[float]
    """Training images per second of each side."""
    samples: Samples | None

    @cached_property
    def checks(self) -> dict[str, Finding]:
        """Of each kind, the quantity to look at."""
        return verdict(self.findings)

    @property
    def good(self) -> bool:
        """The verdict."""
        return all(check.good for check in self.checks.values())

    @property
    def culprit(self) -> Finding | None:
        """The first layer past tolerance, if there is one."""
        return first_past(self.findings["output"])

    @property
    def note(self) -> str:
        """What to make of losses that part while all else agrees."""
        return AMPLIFIED if [name for name, check in self.checks.items() if not check.good] == ["loss"] else ""


def write_report(path: Path, comparison: Comparison) -> None:
    """Write ``comparison`` to ``path``."""
    c, checks = comparison, comparison.checks
    forward = c.findings["output"]
    gradients = sorted(c.findings["gradient"], key=lambda finding: -finding.error)
    names = list(dict.fromkeys([*c.facts[0], *c.facts[1]]))
    write(
        path, "comparison.html", title=f"{c.labels[1]} against {c.labels[0]}", c=c,
        when=f"{datetime.now():%Y-%m-%d %H:%M}",
        verdict=verdict_rows(c), verdict_bad=[not check.good for check in checks.values()],
        reasons=[(name, f"{check.tolerance:.0e}", BOUNDS[name].why) for name, check in checks.items()],
        forward={
            "png": png_of_figure(_error_figure(forward)), "bad": [finding == c.culprit for finding in forward],
            "rows": [(f.which, f"{f.input_error:.2e}", f"{f.error:.2e}") for f in forward],
        },
        gradients={
            "png": png_of_figure(_error_figure(c.findings["gradient"])), "bad": [not f.good for f in gradients],
            "rows": [(f.which, f"{f.reference:.3e}", f"{f.error:.2e}") for f in gradients],
        },
        training={"png": png_of_figure(_loss_figure(c)), "rows": _steps(c)} if c.training else None,
        speeds=[(label, f"{speed:.1f}") for label, speed in zip(c.labels, c.speeds)],
        versions=[(name, *(facts.get(name, "-") for facts in c.facts)) for name in names],
    )  # fmt: skip


def verdict_rows(c: Comparison) -> list[tuple[str, ...]]:
    """Return the lines of the verdict: check, error, where, tolerance, PASS or FAIL."""
    return [
        (name, f"{check.error:.2e}", check.which, f"{check.tolerance:.0e}", "PASS" if check.good else "FAIL")
        for name, check in c.checks.items()
    ]


def _steps(c: Comparison) -> list[tuple[str, ...]]:
    ours, theirs = (side.losses for side in c.training)
    return [
        (f"step {n}", f"{ours[n]:.6e}", f"{theirs.get(n, float('nan')):.6e}", f"{finding.error:.1e}")
        for n, finding in zip(ours, c.findings["loss"])
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
    axes.set_xticks(shown, [findings[i].which for i in shown], rotation=90, fontsize=7)
    axes.legend()
    return figure


def _loss_figure(c: Comparison) -> Figure:
    figure, findings = _figure(5.0), c.findings["loss"]
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
