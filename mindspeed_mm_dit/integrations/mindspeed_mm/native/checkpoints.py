"""Replacements for functions of the engine's checkpointers: a run saves and resumes as in the standalone host.

A save is atomic and has checksums, and only the run that holds the lock of the folder writes there. A full disk costs
only that save. If a checkpoint is damaged, the previous one is used. Each host reads the other's checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from mindspeed_mm.fsdp.checkpoint.dcp_checkpointer import DistributedCheckpointer
from mindspeed_mm.fsdp.checkpoint.hf_checkpointer import HuggingFaceCheckpointer

from mindspeed_mm_dit.errors import UserError
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.framework.exits import end
from mindspeed_mm_dit.integrations.formats.convert import convert
from mindspeed_mm_dit.integrations.mindspeed_mm.native.contract import check_replaced
from mindspeed_mm_dit.integrations.mindspeed_mm.native.run import current
from mindspeed_mm_dit.integrations.mindspeed_mm.native.settings import HF
from mindspeed_mm_dit.terminal import logger
from mindspeed_mm_dit.training.loop import LearningRate


def replace() -> None:
    """Replace the engine's functions with ours (``contract.REPLACED``).

    Raises:
        PlatformError: the engine's functions are not the ones we know.
    """
    for checkpointer in (DistributedCheckpointer, HuggingFaceCheckpointer):
        check_replaced(checkpointer)
        checkpointer.save, checkpointer.load = staticmethod(save), staticmethod(load)


def save(
    path: str, state: dict[str, Any], iteration: int, save_ckpt_dtype: torch.dtype | None = None, **_: Any
) -> None:
    """Save this iteration. At the last one, wait until it is on disk: a run saves once more at its end."""
    run = current()
    run.trained.dtype = save_ckpt_dtype
    try:
        if iteration < run.flags.train_iters:
            run.progress.try_save()
            return
        run.progress.finish()
        if run.exports and runtime.rank() == 0:  # (the engine waits for the first rank)
            convert(path, Path(path) / HF, "diffusers", overwrite=True, echo=logger.info)
    except UserError as error:
        end(error)


def load(path: str, state: dict[str, Any], **_: Any) -> bool:
    """Resume where the run stopped; return True if the run is new, with no checkpoint in ``path`` yet."""
    run = current()
    if run.start is None:
        run.model.init_weights()  # (a model built on the meta device has no weights until now)
        return True
    try:
        progress = run.progress
    except UserError as error:
        end(error)
    rate = LearningRate.of(current().flags).at(progress.iteration)  # which the engine logs next
    state["extra_state"] = {
        "iteration": progress.iteration,
        "consumed_train_samples": progress.consumed_samples,
        "train_dataloader": {},  # it begins at Run.consumed_samples
        "lr_scheduler": {"last_epoch": progress.iteration, "_last_lr": [rate], "lr_lambdas": [None]},
    }
    return False
