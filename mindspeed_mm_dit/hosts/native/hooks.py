"""What the engine lacks, hung into the hooks that it and PyTorch have."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mindspeed_mm_dit.errors import UserError
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.hosts.ending import end
from mindspeed_mm_dit.hosts.native.curves import LOGGER, Curves
from mindspeed_mm_dit.hosts.native.run import current


def hang_in() -> None:
    """Take every step of the optimizer, and follow what is logged of them."""
    register_optimizer_step_pre_hook(_step)
    folder = current().flags.parts["tensorboard_dir"]
    if folder is not None and runtime.rank() == 0:
        logging.getLogger(LOGGER).addHandler(Curves(folder))


def _step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Step by every host's optimizer, which then leaves no gradient that the engine's own could step by."""
    if optimizer not in current().trained.optimizer.optimizers:  # (whose steps are met here too)
        try:
            current().step()
        except UserError as error:
            end(error)
