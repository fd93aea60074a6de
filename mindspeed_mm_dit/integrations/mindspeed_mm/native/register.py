"""Register our model, data and collator with the engine, and replace its checkpointers' functions by ours.

A run saves and resumes as in the standalone host: a save is atomic and has checksums, and only the run that holds the
lock of the folder writes there. A full disk costs only that save. If a checkpoint is damaged, the previous one is used.
Each host reads the other's checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from mindspeed_mm.fsdp.checkpoint.dcp_checkpointer import DistributedCheckpointer
from mindspeed_mm.fsdp.checkpoint.hf_checkpointer import HuggingFaceCheckpointer
from mindspeed_mm.fsdp.data.dataloader.data_collator import DATA_COLLATOR
from mindspeed_mm.fsdp.utils.register import data_register, model_register

from mindspeed_mm_dit.errors import ConfigError, UserError
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.framework.exits import end
from mindspeed_mm_dit.integrations.formats.convert import convert
from mindspeed_mm_dit.integrations.mindspeed_mm.native.contract import check_replaced
from mindspeed_mm_dit.integrations.mindspeed_mm.native.data import WholeBatchCollator, datasets
from mindspeed_mm_dit.integrations.mindspeed_mm.native.host import install_hooks
from mindspeed_mm_dit.integrations.mindspeed_mm.native.model import NativeModel, inject_our_adapters
from mindspeed_mm_dit.integrations.mindspeed_mm.native.run import current
from mindspeed_mm_dit.integrations.mindspeed_mm.native.settings import COLLATOR_ID, DATA_ID, HF, MODEL_ID
from mindspeed_mm_dit.terminal import logger
from mindspeed_mm_dit.training.loop import LearningRate


def register() -> None:
    """Add model, data and collator to the engine's tables, and install the hooks.

    Raises:
        ConfigError: another plugin has taken one of the names; then nothing has been added.
    """
    for name, registered in (
        (f"model.model_id = {MODEL_ID}", model_register._registry.get(MODEL_ID)),
        (f"data.dataset_param.dataset_type = {DATA_ID}", data_register._registry.get(DATA_ID)),
        (f"collate_param.collator_id = {COLLATOR_ID}", DATA_COLLATOR.get(COLLATOR_ID)),
    ):
        if registered is not None:
            owner = f"{registered.__module__}.{registered.__qualname__}"
            raise ConfigError(f"{name} is taken by {owner}. Unload the other plugin (training.plugin).")
    model_register.register(MODEL_ID)(NativeModel)
    data_register.register(DATA_ID)(datasets)
    DATA_COLLATOR[COLLATOR_ID] = WholeBatchCollator
    _replace_checkpointing()
    if current().flags.lora_target_modules:
        inject_our_adapters()
    install_hooks()


def _replace_checkpointing() -> None:
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
