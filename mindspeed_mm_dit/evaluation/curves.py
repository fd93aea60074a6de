"""Loss curves out of TensorBoard folders, and loss curves as pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mindspeed_mm_dit.evaluation.logs import Curve


def read_scalar(folder: str | Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (steps, values) of a scalar in a TensorBoard folder; of a step written twice, the later value."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    if name not in events.Tags()["scalars"]:
        return np.empty(0, int), np.empty(0)
    by_step = {event.step: event.value for event in events.Scalars(name)}
    steps = sorted(by_step)
    return np.array(steps), np.array([by_step[step] for step in steps])


def smooth(values: np.ndarray, span: int) -> np.ndarray:
    """Running mean over the last ``span`` values (fewer at the start)."""
    sums = np.cumsum(np.insert(values, 0, 0.0))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - span, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def draw_loss(path: Path, training: tuple[np.ndarray, np.ndarray], validation: tuple[np.ndarray, np.ndarray]) -> None:
    """Draw a loss curve: every value in grey, the smoothed one and the validation over it."""
    from matplotlib.figure import Figure

    steps, losses = training
    figure = Figure(figsize=(8, 4.5), dpi=110, layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, losses, color="0.8", linewidth=0.8, label="each log line")
    axes.plot(steps, smooth(losses, max(1, len(losses) // 40)), color="tab:blue", label="smoothed")
    if len(validation[0]):
        axes.plot(*validation, color="tab:orange", marker="o", markersize=3, label="held-out images")
    axes.set(xlabel="step", ylabel="loss", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def draw_losses(path: Path, curves: Sequence[Curve], span: int | None = None) -> None:
    """Draw the losses of several runs over each other: every value faintly, the smoothed curve over it.

    span: log lines in the running mean; 1 is none, None a fortieth of each curve.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), dpi=110, layout="constrained")
    axes = figure.subplots()
    for number, curve in enumerate(curves):
        values = smooth(curve.losses, span or max(1, len(curve.losses) // 40))
        axes.plot(curve.steps, curve.losses, color=f"C{number % 10}", alpha=0.25, linewidth=0.8)
        axes.plot(curve.steps, values, color=f"C{number % 10}", label=curve.label)
    positive = all((curve.losses > 0).all() for curve in curves)
    axes.set(xlabel="step", ylabel="loss", yscale="log" if positive else "linear")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
