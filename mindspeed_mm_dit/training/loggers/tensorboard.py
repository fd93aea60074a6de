"""--tensorboard-dir: scalars and pictures of a run for TensorBoard.

tensorboardX's SummaryWriter passes events to a thread: if a full disk kills it, the next events wait forever.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit.training.loggers.registry import MetricsLogger, MetricsLoggerKind, flag


@dataclass(frozen=True)
class TensorBoardConfig:
    """The folder of the event file, with Megatron's flag."""

    dir: str | None = flag("DIR", "folder of the TensorBoard events")


class Scalars(MetricsLogger):
    """An event file in ``folder``, written and flushed at once; steps after ``iteration`` in older files are hidden.

    Those steps belong to a run that ended before it saved them.
    """

    def __init__(self, folder: str, iteration: int) -> None:
        from tensorboardX.event_file_writer import EventsWriter

        Path(folder).mkdir(parents=True, exist_ok=True)
        self._file = EventsWriter(str(Path(folder) / "events"))
        if iteration:
            self._write(step=iteration + 1, session_log={"status": "START"})

    def add(self, iteration: int, values: Mapping[str, float]) -> None:
        """Write values by name."""
        from tensorboardX.summary import scalar

        self._add(iteration, (scalar(name, value) for name, value in values.items()))

    def add_picture(self, iteration: int, name: str, pixels: np.ndarray) -> None:
        from tensorboardX.summary import image

        self._add(iteration, [image(name, pixels, dataformats="HWC")])

    def close(self) -> None:
        self._file.close()

    def _add(self, iteration: int, summaries: Iterable[Any]) -> None:
        for summary in summaries:
            self._write(step=iteration, summary=summary)
        self._file.flush()

    def _write(self, **content: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._file.write_event(Event(wall_time=time.time(), **content))


TENSORBOARD = MetricsLoggerKind(
    "tensorboard",
    TensorBoardConfig,
    lambda config, opening: Scalars(opening.folder, opening.iteration),
    lambda config, save_parent: Path(config.dir) if config.dir else None,
    packages=("tensorboardX",),
    install="tensorboardX",
    in_megatron=True,
)
