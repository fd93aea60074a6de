"""Loss curves out of TensorBoard folders, as a picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np


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
