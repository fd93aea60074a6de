"""The scalars of a TensorBoard folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def read_scalar(folder: str | Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (steps, values) of a scalar in a TensorBoard folder; of a step written twice, the later value."""
    by_step = read_scalars(folder).get(name, {})
    return np.array(list(by_step), int), np.array(list(by_step.values()), float)


def read_scalars(folder: str | Path) -> dict[str, dict[int, float]]:
    """Return name -> step -> value of all scalars in a TensorBoard folder, steps ascending."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    by_name = {name: {event.step: event.value for event in events.Scalars(name)} for name in events.Tags()["scalars"]}
    return {name: dict(sorted(by_step.items())) for name, by_step in by_name.items()}
