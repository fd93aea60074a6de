"""Loss curves from logs of this project, MindSpeed-MM and facebookresearch/DiT, as text or in TensorBoard."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit.cli.commands import COMMANDS
from mindspeed_mm_dit.configs.files import is_folder
from mindspeed_mm_dit.configs.run import check_output_file
from mindspeed_mm_dit.errors import ConfigError, DataError
from mindspeed_mm_dit.sampling.pictures import font_for
from mindspeed_mm_dit.terminal import echo
from mindspeed_mm_dit.training import log as read_logs
from mindspeed_mm_dit.training.log import (
    NUMBER,
    QUARTERS,
    TRAINING_SCALARS,
    first_of_names,
    quarter_name,
    quarter_scalar,
    read_folder,
    read_scalars,
    read_text,
    step_of,
)

_PUBLISHED_DIT = re.compile(rf"\(step=(\d+)\) *train loss: *{NUMBER}", re.I)
_VALIDATION = re.compile(r"\bvalidation loss at iteration +(\d+)(?: on validation set)? *\|", re.I)
_VALIDATION_VALUE = re.compile(rf"\| *(?:lm )?(loss|noise [\d-]+%) value: *{NUMBER}", re.I)

HELD_OUT = "held-out images"
VALIDATION_SCALARS = {
    HELD_OUT: ("valid/loss", "lm loss validation", "loss validation"),
    **{quarter_name(quarter): (quarter_scalar(quarter), f"{quarter_name(quarter)} validation") for quarter in QUARTERS},
}
"""Curves of a validation, and their names in TensorBoard: ours, and what Megatron makes of ours."""

KNOWN_FORMATS = (
    "this project's and MindSpeed-MM's ('iteration 20/ 800 | ... | loss: 1.0E+00 |')",
    "facebookresearch/DiT's ('(step=0000100) Train Loss: 0.2000')",
    "a TensorBoard folder with the scalar 'train/loss'",
)


@dataclass(frozen=True)
class Curve:
    """Losses by step."""

    label: str
    """Their name in a picture."""
    steps: np.ndarray
    """(N,) int64, ascending."""
    losses: np.ndarray
    """(N,) float64."""


def read_curve(path: str | Path) -> Curve:
    """Read the losses of a run from its log file or TensorBoard folder; if a step was logged twice, the later value.

    Raises:
        DataError: the log cannot be read, holds no loss in a known format, or holds a step that no run can have.
    """
    path = _tensorboard_folder(path)
    losses = first_of_names(read_folder(path), TRAINING_SCALARS) if is_folder(path) else read_text(path, parse_losses)
    if not losses:
        raise DataError(f"{path} contains no losses. The known formats are {'; '.join(KNOWN_FORMATS)}.")
    return _curve(str(path), losses)


def read_validation(path: str | Path) -> list[Curve]:
    """Read the validation losses of a run, from the same sources as ``read_curve``: the mean, then each quarter.

    Logs from before the quarters have only the mean; if nothing was validated, the list is empty.
    """
    path = _tensorboard_folder(path)
    if is_folder(path):
        scalars = read_folder(path)
        curves = {name: first_of_names(scalars, tags) for name, tags in VALIDATION_SCALARS.items()}
    else:
        curves = read_text(path, parse_validation)
    return [_curve(name, losses) for name, losses in curves.items() if losses]


def _tensorboard_folder(path: str | Path) -> Path:
    """Return the TensorBoard folder of a run if ``path`` is the run's folder, otherwise ``path``."""
    below = Path(path) / "tensorboard"
    return below if is_folder(below) else Path(path)


def _curve(label: str, losses: dict[int, float]) -> Curve:
    steps = sorted(losses)
    return Curve(label, np.array(steps, np.int64), np.array([losses[step] for step in steps]))


def parse_losses(lines: Iterable[str]) -> dict[int, float]:
    """Return step -> loss from the lines of a log in any known format; empty if the format is unknown.

    Raises ValueError for a step that no run can have.
    """
    lines = list(lines)
    published = {step_of(m[1]): float(m[2]) for m in map(_PUBLISHED_DIT.search, lines) if m}
    return read_logs.parse_losses(lines) or published


def parse_validation(lines: Iterable[str]) -> dict[str, dict[int, float]]:
    """Return step -> loss on held-out images, by name, from this project's lines and Megatron's.

    Raises ValueError as ``parse_losses`` does.
    """
    curves: dict[str, dict[int, float]] = {name: {} for name in VALIDATION_SCALARS}
    for line in lines:
        if match := _VALIDATION.search(line):
            for name, value in _VALIDATION_VALUE.findall(line):
                label = HELD_OUT if name == "loss" else name
                if label in curves:
                    curves[label][step_of(match[1])] = float(value)
    return curves


def read_scalar(folder: str | Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (steps, values) of a scalar in a TensorBoard folder; if a step was written twice, the later value."""
    by_step = read_scalars(folder).get(name, {})
    return np.array(list(by_step), int), np.array(list(by_step.values()), float)


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
        text, font = font_for(name.get_text())
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


DESCRIPTION = """\
Draw the loss curves of one run or several in one picture: on training data, and on held-out data if there is any.
With one run, a second panel shows the held-out loss for each quarter of the noise level, from data to noise.

  mm-dit plot outputs/digits train.log ../DiT/results/000-DiT-XL-2/log.txt --output loss.png

A LOG is the folder of a run, a TensorBoard folder, or a text log: ours, MindSpeed-MM's or facebookresearch/DiT's."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the command."""
    parser.add_argument("logs", nargs="+", metavar="LOG", help="log file, or folder of a run or of TensorBoard")
    parser.add_argument("--output", default="loss.png", metavar="PNG", help="picture to write (default loss.png)")
    parser.add_argument(
        "--smooth",
        type=int,
        metavar="N",
        help="running mean over N log lines; 1: no smoothing (default: 1/40 of each curve)",
    )


def run(args: argparse.Namespace) -> int:
    """Read the logs, draw them, and print what was read."""
    if Path(args.output).suffix != ".png":
        raise ConfigError(f"--output = {args.output} must end in .png.")
    if args.smooth is not None and args.smooth < 1:
        raise ConfigError(f"--smooth = {args.smooth} must be at least 1.")

    check_output_file("--output", args.output)

    curves = [read_curve(log) for log in args.logs]
    validations = [read_validation(log) for log in args.logs]
    if len(curves) == 1:
        draw_loss(Path(args.output), curves[0], validations[0], args.smooth)
    else:
        draw_losses(Path(args.output), curves, validations, args.smooth)
    for curve in curves:
        echo(
            f"{curve.label}: {len(curve.steps)} losses, step {curve.steps[0]} to {curve.steps[-1]}, "
            f"last {curve.losses[-1]:.6g}"
        )
    echo(args.output)
    return 0
