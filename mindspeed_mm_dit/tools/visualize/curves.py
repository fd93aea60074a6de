"""Draw loss curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit.cli.commands import COMMANDS
from mindspeed_mm_dit.sampling.fonts import drawable
from mindspeed_mm_dit.tools.visualize.logs import Curve, read_scalar, read_validation

_HELD_OUT: dict[str, Any] = {"color": "tab:orange", "marker": "o", "markersize": 3}
_LAWS = "Validation covers the noise levels evenly, training draws them at random:\ncompare each curve with itself."


def smooth(values: np.ndarray, span: int) -> np.ndarray:
    """Return the running mean over the last ``span`` values (fewer at the start)."""
    sums = np.cumsum(np.insert(values, 0, 0.0))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - span, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def draw_loss_of_run(folder: Path, tensorboard_dir: str) -> Path:
    """Draw the losses of a run from its TensorBoard folder into ``folder``, and return the picture.

    Raises:
        PlatformError: matplotlib or tensorboard is not installed.
    """
    COMMANDS["plot"].check("plot")
    training = Curve("training", *read_scalar(tensorboard_dir, "train/loss"))
    draw_loss(folder / "loss.png", training, read_validation(tensorboard_dir))
    return folder / "loss.png"


def draw_loss(path: Path, training: Curve, validation: Sequence[Curve], span: int | None = None) -> None:
    """Draw the losses of a run: every value in grey, and over it the running mean and the mean of each validation.

    If validations have quarters, a second panel shows them on the same scale. span: as in ``draw_losses``.
    """
    from matplotlib.figure import Figure

    columns = 2 if len(validation) > 1 else 1
    figure = Figure(figsize=(3.5 + 4.5 * columns, 4.5), dpi=110, layout="constrained")
    (left, *right) = figure.subplots(1, columns, sharex=True, sharey=True, squeeze=False)[0]
    span = span or _span(training)
    if span > 1:
        left.plot(training.steps, training.losses, color="0.8", linewidth=0.8, label="training, each log line")
    name = f"training, mean of {span} lines" if span > 1 else "training"
    left.plot(training.steps, smooth(training.losses, span), color="tab:blue", label=name)
    for axes in (left, *right):
        for mean in validation[:1]:
            axes.plot(mean.steps, mean.losses, **_HELD_OUT, label=mean.label)
        _finish(axes, [training, *validation])
    if validation:
        left.set_title(_LAWS, fontsize=8)
    for axes in right:
        _draw_quarters(axes, validation[1:])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_quarters(axes: Any, quarters: Sequence[Curve]) -> None:
    from matplotlib import colormaps

    for number, quarter in enumerate(quarters):
        color = colormaps["viridis"](number / len(quarters))
        axes.plot(quarter.steps, quarter.losses, color=color, marker="o", markersize=3, label=quarter.label)
    axes.set(title="held-out images by noise level", ylabel="")
    axes.legend()


def _finish(axes: Any, curves: Sequence[Curve]) -> None:
    """Label the axes; if all losses are above 0, use a logarithmic axis with its numbers written out."""
    from matplotlib.ticker import LogLocator

    axes.set(xlabel="step", ylabel="loss")
    if all((curve.losses > 0).all() for curve in curves):
        axes.set(yscale="log")
        axes.yaxis.set_minor_locator(LogLocator(subs=(2.0, 3.0, 5.0)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
    axes.grid(alpha=0.3, which="both")
    axes.legend()


def _write_out(names: Sequence[Any]) -> None:
    """Give each run's name a font that has its letters; a note lists letters that no font has."""
    from matplotlib.font_manager import FontProperties

    for name in names:
        text, font = drawable(name.get_text())
        name.set_text(text)
        if isinstance(font.path, str):  # (else plain letters, which every font has)
            name.set_font(FontProperties(fname=font.path, size=name.get_fontsize()))


def _span(curve: Curve) -> int:
    return max(1, len(curve.losses) // 40)


def draw_losses(
    path: Path, curves: Sequence[Curve], validations: Sequence[Sequence[Curve]], span: int | None = None
) -> None:
    """Draw the losses of several runs in one plot.

    Every value is drawn faintly, and over it the smoothed curve and, dashed, the mean of each validation.

    validations: for each run, what ``read_validation`` returns; span: log lines in the running mean; 1 does not smooth,
    None takes a fortieth of each curve.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), dpi=110, layout="constrained")
    axes = figure.subplots()
    for number, (curve, validation) in enumerate(zip(curves, validations)):
        color = f"C{number % 10}"
        axes.plot(curve.steps, curve.losses, color=color, alpha=0.25, linewidth=0.8)
        axes.plot(curve.steps, smooth(curve.losses, span or _span(curve)), color=color, label=curve.label)
        for mean in validation[:1]:
            axes.plot(mean.steps, mean.losses, "--o", color=color, markersize=3, label=f"{curve.label}, {mean.label}")
    _finish(axes, [*curves, *(mean for validation in validations for mean in validation[:1])])
    _write_out(axes.legend().get_texts())
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
