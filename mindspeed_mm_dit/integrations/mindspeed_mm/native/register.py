"""Register our model, data and collator with the engine, and install our hooks."""

from __future__ import annotations

from typing import Any

from mindspeed_mm.fsdp.data.dataloader.data_collator import DATA_COLLATOR
from mindspeed_mm.fsdp.utils.register import data_register, model_register

from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.integrations.mindspeed_mm.native import checkpoints
from mindspeed_mm_dit.integrations.mindspeed_mm.native.data import WholeBatchCollator, datasets
from mindspeed_mm_dit.integrations.mindspeed_mm.native.host import install_hooks
from mindspeed_mm_dit.integrations.mindspeed_mm.native.model import NativeModel, inject_our_adapters
from mindspeed_mm_dit.integrations.mindspeed_mm.native.run import current
from mindspeed_mm_dit.integrations.mindspeed_mm.native.settings import COLLATOR_ID, DATA_ID, MODEL_ID


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
            raise ConfigError(f"{name} is taken by {_name(registered)}. Unload the other plugin (training.plugin).")
    model_register.register(MODEL_ID)(NativeModel)
    data_register.register(DATA_ID)(datasets)
    DATA_COLLATOR[COLLATOR_ID] = WholeBatchCollator
    checkpoints.replace()
    if current().flags.lora_target_modules:
        inject_our_adapters()
    install_hooks()


def _name(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"
