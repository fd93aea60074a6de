"""The functions of the engine's checkpointers that are replaced: a run saves, and goes on, as in the standalone host.

So a save is whole or not there, has checksums, and is written by the only run that the folder belongs to. A full disk
costs that save alone, a damaged checkpoint is passed over for the one before, and either host reads the other's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from mindspeed_mm.fsdp.checkpoint.dcp_checkpointer import DistributedCheckpointer
from mindspeed_mm.fsdp.checkpoint.hf_checkpointer import HuggingFaceCheckpointer

from mindspeed_mm_dit.checkpoint.convert import convert
from mindspeed_mm_dit.errors import UserError
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.hosts.early_exit import end
from mindspeed_mm_dit.hosts.native.contract import check_replaced
from mindspeed_mm_dit.hosts.native.run import current
from mindspeed_mm_dit.hosts.native.settings import HF
from mindspeed_mm_dit.training.lr import LearningRate


def replace() -> None:
    """Put our functions in place of the engine's (``contract.REPLACED``).

    Raises:
        PlatformError: the engine's are not those we know.
    """
    for checkpointer in (DistributedCheckpointer, HuggingFaceCheckpointer):
        check_replaced(checkpointer)
        checkpointer.save, checkpointer.load = staticmethod(save), staticmethod(load)


def save(
    path: str, state: dict[str, Any], iteration: int, save_ckpt_dtype: torch.dtype | None = None, **_: Any
) -> None:
    """Save this iteration; at the last one wait until it is on disk, for at its end a run saves once more."""
    run = current()
    run.trained.dtype = save_ckpt_dtype
    try:
        if iteration < run.flags.train_iters:
            run.progress.try_save()
            return
        run.progress.finish()
        if run.exports and runtime.rank() == 0:  # (the engine waits for the first rank)
            convert(path, Path(path) / HF, "diffusers", overwrite=True, say=print)
    except UserError as error:
        end(error)


def load(path: str, state: dict[str, Any], **_: Any) -> bool:
    """Go on where the run stopped; return whether it begins, since ``path`` holds no checkpoint yet."""
    run = current()
    if run.start is None:
        run.model.init_weights()  # (a model built without memory has none until now)
        return True
    try:
        progress = run.progress
    except UserError as error:
        end(error)
    state["extra_state"] = {
        "iteration": progress.iteration,
        "consumed_train_samples": progress.consumed_samples,
        "train_dataloader": {},  # it begins where Run.consumed_samples says
        "lr_scheduler": _schedule_at(progress.iteration),
    }
    return False


def _schedule_at(iteration: int) -> dict[str, Any]:
    """Return what the engine's scheduler is after ``iteration`` steps: what its log says of the next one."""
    rate = LearningRate.of(current().flags).at(iteration)
    return {"last_epoch": iteration, "_last_lr": [rate], "lr_lambdas": [None]}
