"""Add what the engine lacks through its hooks and PyTorch's; loss curves are read from the lines that it logs."""

from __future__ import annotations

import logging
import re
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mindspeed_mm_dit.errors import UserError
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.framework.exits import end
from mindspeed_mm_dit.integrations.mindspeed_mm.native.run import current
from mindspeed_mm_dit.training.loggers import tensorboard
from mindspeed_mm_dit.training.loggers.contract import Opening
from mindspeed_mm_dit.training.loggers.registry import Guarded

LOGGER = "mindspeed_mm.fsdp.train.train_engine"
"""The engine's logger of training progress, on its first rank."""

_NUMBER = r"(\S+) \|"
_STEP = re.compile(rf"iteration +(\d+)/.*learning rate: {_NUMBER}.* loss: {_NUMBER}(?:.* grad norm: {_NUMBER})?")
_VALIDATION = re.compile(rf"validation after iteration (\d+) .*validation loss: {_NUMBER}")


class Curves(logging.Handler):
    """Writes each logged step and validation to event files in ``folder``, which begin with the first of them."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = folder
        self._scalars: Guarded | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Extract the numbers from a line, and write them."""
        logged = numbers_of(record.getMessage())
        if logged is None:
            return
        iteration, values = logged
        if self._scalars is None:
            config = tensorboard.TensorBoardConfig(self._folder)
            self._scalars = Guarded(tensorboard.KIND, config, Opening(iteration - 1, self._folder, {}))
        self._scalars.add(iteration, values)


def numbers_of(line: str) -> tuple[int, dict[str, float]] | None:
    """Return the iteration of a logged line, and its scalars by the names that all hosts use; None for other lines."""
    if step := _STEP.search(line):
        values = {"train/learning_rate": step[2], "train/loss": step[3], "train/grad_norm": step[4]}
        return int(step[1]), {name: float(value) for name, value in values.items() if value is not None}
    if validation := _VALIDATION.search(line):
        return int(validation[1]), {"valid/loss": float(validation[2])}
    return None


def install_hooks() -> None:
    """Install the hooks: replace the optimizer's steps by ours, and read the log."""
    register_optimizer_step_pre_hook(_step)
    folder = current().flags.parts["tensorboard_dir"]
    if folder is not None and runtime.rank() == 0:
        logging.getLogger(LOGGER).addHandler(Curves(folder))


def _step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Step with our optimizer, which leaves no gradients for the engine's optimizer."""
    if optimizer not in current().trained.optimizer.optimizers:  # (our own optimizers call this hook too)
        try:
            current().step()
        except UserError as error:
            end(error)
