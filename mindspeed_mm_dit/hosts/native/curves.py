"""The curves of a run for TensorBoard, read off the lines that the engine logs."""

from __future__ import annotations

import logging
import re

from mindspeed_mm_dit.training.trackers.tensorboard import Scalars

LOGGER = "mindspeed_mm.fsdp.train.train_engine"
"""Which of the engine's loggers says how a run goes, on its first rank."""

_NUMBER = r"(\S+) \|"
_STEP = re.compile(rf"iteration +(\d+)/.*learning rate: {_NUMBER}.* loss: {_NUMBER}(?:.* grad norm: {_NUMBER})?")
_VALIDATION = re.compile(rf"validation after iteration (\d+) .*validation loss: {_NUMBER}")


class Curves(logging.Handler):
    """Writes each logged step and validation to the event files in ``folder``; begins with the first of them."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = folder
        self._scalars: Scalars | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Take the numbers out of a line."""
        found = numbers_of(record.getMessage())
        if found is None:
            return
        iteration, values = found
        if self._scalars is None:
            self._scalars = Scalars(self._folder, iteration - 1)
        self._scalars.add(iteration, values)


def numbers_of(line: str) -> tuple[int, dict[str, float]] | None:
    """Return the iteration of a logged line, and the scalars in it by the names of every host; None for other lines."""
    if step := _STEP.search(line):
        values = {"train/learning_rate": step[2], "train/loss": step[3], "train/grad_norm": step[4]}
        return int(step[1]), {name: float(value) for name, value in values.items() if value is not None}
    if validation := _VALIDATION.search(line):
        return int(validation[1]), {"valid/loss": float(validation[2])}
    return None
