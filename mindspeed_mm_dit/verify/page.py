"""The page that ``mm-dit compare`` writes: one HTML file with its pictures inside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mindspeed_mm_dit.pages import embed, folded, image, table, write_page
from mindspeed_mm_dit.verify.compare import REASONS, Check, Finding, LayerFinding, first_past
from mindspeed_mm_dit.verify.processes import Training

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AMPLIFIED = (
    "A high learning rate amplifies rounding from step to step. Compare again with a smaller --lr in the file of "
    "--train-args: rounding then stays within the tolerance, and a fault of the optimizer does not."
)


@dataclass(frozen=True)
class Samples:
    """The same images drawn by both sides."""

    pictures: tuple[bytes, bytes]
    """A PNG of each side's."""
    largest_difference: int
    """Of a pixel, in levels of 0 ... 255."""
    changed: float
    """Share of pixels that differ at all."""
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
    checks: list[Check]
    layers: list[LayerFinding]
    gradients: list[Finding]
    training: tuple[Training, Training] | None
    losses: list[Finding]
    """Of each training step."""
    speeds: tuple[float, float] | None
    """Training images per second of each side."""
    samples: Samples | None

    @property
    def good(self) -> bool:
        """The verdict."""
        return all(check.good for check in self.checks)

    @property
    def culprit(self) -> LayerFinding | None:
        """The first layer past tolerance, if there is one."""
        (tolerance,) = {check.tolerance for check in self.checks if check.name == "forward"}
        return first_past(self.layers, tolerance)

    @property
    def note(self) -> str:
        """What to make of losses that part while all else agrees."""
        return AMPLIFIED if [check.name for check in self.checks if not check.good] == ["training"] else ""


def write_report(path: Path, comparison: Comparison) -> None:
    """Write ``comparison`` to ``path``."""
    c = comparison
    verdict = "PASS" if c.good else "FAIL"
    title = f"{c.labels[1]} against {c.labels[0]}"
    parts = [
        f"<h1>{escape(title)}: <span class={verdict}>{verdict}</span></h1>",
        f"<p>{datetime.now():%Y-%m-%d %H:%M}. Error is the norm of the difference over the norm of the reference, "
        f"{escape(c.labels[0])}.</p>",
        table(("", ""), [(name, value) for name, value in c.about.items()]),
        "<h2>Verdict</h2>", _verdict(c.checks), *_reasons(c.checks),
        "<h2>Forward, layer by layer</h2>", _forward_text(c), image(_layer_figure(c)), _layer_table(c),
        "<h2>Gradients, parameter by parameter</h2>", image(_gradient_figure(c)), _gradient_table(c),
        *_training_parts(c), *_sample_parts(c),
        "<h2>Versions</h2>", _versions(c),
    ]  # fmt: skip
    write_page(path, title, parts)


def _verdict(checks: Sequence[Check]) -> str:
    rows = [
        (check.name, f"{check.error:.2e}", check.where, f"{check.tolerance:.0e}", "PASS" if check.good else "FAIL")
        for check in checks
    ]
    return table(("check", "error", "where", "tolerance", "verdict"), rows, [not check.good for check in checks])


def _reasons(checks: Sequence[Check]) -> list[str]:
    return [f"<p><b>Why {c.tolerance:.0e} for {c.name}.</b> {escape(REASONS[c.name])}</p>" for c in checks]


def _forward_text(c: Comparison) -> str:
    if c.culprit is None:
        return "<p>No layer is past tolerance.</p>"
    return (
        f"<p>First layer past tolerance: <code class=FAIL>{escape(c.culprit.name)}</code>. "
        f"Its inputs differ by {c.culprit.input_error:.1e}, its output by {c.culprit.error:.1e}.</p>"
    )


def _layer_table(c: Comparison) -> str:
    rows = [(layer.name, f"{layer.input_error:.2e}", f"{layer.error:.2e}") for layer in c.layers]
    heads = ("layer, in order of execution", "error of its inputs", "error of its output")
    return folded(f"all {len(rows)} layers", table(heads, rows, [layer == c.culprit for layer in c.layers]))


def _gradient_table(c: Comparison) -> str:
    tolerance = next(check.tolerance for check in c.checks if check.name == "gradients")
    ordered = sorted(c.gradients, key=lambda finding: -finding.error)
    rows = [(finding.name, f"{finding.norm:.3e}", f"{finding.error:.2e}") for finding in ordered]
    heads = ("parameter, worst first", "norm", "error")
    return folded(f"all {len(rows)} parameters", table(heads, rows, [f.error > tolerance for f in ordered]))


def _training_parts(c: Comparison) -> list[str]:
    if c.training is None or c.speeds is None:
        return []
    speeds = [(label, f"{speed:.1f}") for label, speed in zip(c.labels, c.speeds)]
    rows = [
        (finding.name, *(f"{side.losses.get(number, float('nan')):.6e}" for side in c.training), f"{finding.error:.1e}")
        for finding, number in zip(c.losses, c.training[0].losses)
    ]
    return [
        f"<h2>The first {len(rows)} steps of training</h2>",
        *([f"<p>Note: {escape(c.note)}</p>"] if c.note else []), image(_loss_figure(c, c.training)),
        folded("every step", table(("", *c.labels, "relative difference"), rows)),
        "<h2>Speed</h2>", table(("", "training images/s (median of the second half of the steps)"), speeds),
    ]  # fmt: skip


def _sample_parts(c: Comparison) -> list[str]:
    if c.samples is None:
        return []
    pictures = "".join(
        f"<figure>{embed(png, label)}<figcaption>{escape(label)}</figcaption></figure>"
        for label, png in zip(c.labels, c.samples.pictures)
    )
    return [
        "<h2>Samples, same weights and noise</h2>",
        f"<p>{escape(c.samples.how)}. Largest difference of a pixel: {c.samples.largest_difference} of 255; "
        f"{c.samples.changed:.2%} of the pixels differ. Not part of the verdict: rounding alone can move a pixel by a "
        "level.</p>",
        pictures,
    ]


def _versions(c: Comparison) -> str:
    names = list(dict.fromkeys([*c.facts[0], *c.facts[1]]))
    return table(("", *c.labels), [(name, *(facts.get(name, "-") for facts in c.facts)) for name in names])


# --- pictures --------------------------------------------------------------------------------------------


def _figure(height: float = 3.6) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(10, height), dpi=100, layout="constrained")


def _layer_figure(c: Comparison) -> Figure:
    figure = _figure(4.2)
    tolerance = next(check.tolerance for check in c.checks if check.name == "forward")
    _draw_errors(figure.subplots(), [(layer.name, layer.error) for layer in c.layers], tolerance)
    return figure


def _gradient_figure(c: Comparison) -> Figure:
    figure = _figure(4.2)
    tolerance = next(check.tolerance for check in c.checks if check.name == "gradients")
    _draw_errors(figure.subplots(), [(finding.name, finding.error) for finding in c.gradients], tolerance)
    return figure


def _draw_errors(axes: Any, errors: Sequence[tuple[str, float]], tolerance: float) -> None:
    """Draw errors on a logarithmic axis against the tolerance; those that are 0 or infinite sit at its ends."""
    values = np.clip(np.array([error for _, error in errors]), 1e-9, 1e3)
    places = np.arange(len(values))
    axes.bar(places, values, color=np.where(values > tolerance, "tab:red", "tab:blue"), width=0.8)
    axes.axhline(tolerance, color="0.3", linestyle="--", linewidth=1, label=f"tolerance {tolerance:.0e}")
    axes.set(ylabel="relative error", yscale="log", ylim=(1e-9, max(10 * tolerance, 2 * values.max())))
    shown = places[:: max(1, len(places) // 45)]
    axes.set_xticks(shown, [errors[i][0] for i in shown], rotation=90, fontsize=7)
    axes.legend()


def _loss_figure(c: Comparison, training: tuple[Training, Training]) -> Figure:
    figure = _figure(5.0)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    for label, side, style in zip(c.labels, training, ("-", "--")):
        above.plot(list(side.losses), list(side.losses.values()), style, label=label, linewidth=2)
    above.set(ylabel="loss")
    above.legend()
    steps, check = list(training[0].losses), next(check for check in c.checks if check.name == "training")
    below.plot(steps, np.clip([finding.error for finding in c.losses], 1e-9, 1e3), "o-", markersize=3)
    below.axhline(check.tolerance, color="0.3", linestyle="--", linewidth=1)
    below.set(xlabel="step", ylabel="relative difference", yscale="log")
    return figure
