"""The list of everything this package relies on in MindSpeed-MM, and the check that the host has it.

The list is checked whenever the host is attached; tests/contract compares it with our imports.
"""

from __future__ import annotations

import os

from mindspeed_mm_dit.errors import ConfigError, PlatformError
from mindspeed_mm_dit.integrations.mindspeed_mm.installed import ReliedOn, missing_from
from mindspeed_mm_dit.integrations.mindspeed_mm.megatron import versions

RELIED_ON: ReliedOn = {
    "megatron.core.enums": {"ModelType": None},
    "megatron.training": {"get_args": None, "print_rank_0": None},
    "megatron.training.arguments": {"core_transformer_config_from_args": ("args", "config_class")},
    "megatron.training.utils": {"average_losses_across_data_parallel_group": ("losses",)},
    "mindspeed.megatron_adaptor": {},
    "mindspeed_mm.configs.config": {"mm_extra_args_provider": ("parser",)},
    "mindspeed_mm.mindspore.mindspore_adaptor": {},
    "mindspeed_mm.models.ae.base": {"AE_MODEL_MAPPINGS": None},
    "mindspeed_mm.models.common.module": {"MultiModalModule": ("config",)},
    "mindspeed_mm.models.diffusion.diffusion_model": {"DIFFUSION_MODEL_MAPPINGS": None},
    "mindspeed_mm.models.predictor.predict_model": {"PREDICTOR_MODEL_MAPPINGS": None},
    "mindspeed_mm.models.transformers.base_model": {"FSDP2Mixin": ()},
    "mindspeed_mm.patchs.torch_dcp_patch": {},
    "mindspeed_mm.training": {
        "pretrain": (
            "train_valid_test_dataset_provider",
            "model_provider",
            "model_type",
            "forward_step_func",
            "process_non_loss_data_func",
            "extra_args_provider",
            "args_defaults",
        )
    },
    "checkpoint.common.converter": {"Commandable": None},
    "checkpoint.convert_cli": {"main": ()},
}


IN_THEIR_SCRIPTS = (
    "mindspeed_mm.models.ae.base",
    "mindspeed_mm.models.diffusion.diffusion_model",
    "mindspeed_mm.models.predictor.predict_model",
)
"""Needed only by our models in the host's own scripts (``run``), ..."""
CONVERTING = ("checkpoint.common.converter", "checkpoint.convert_cli")
"""... only by the converter, ..."""
ON_MINDSPORE = ("mindspeed_mm.mindspore.mindspore_adaptor",)
"""... and only by --ai-framework mindspore."""


def check_host(mindspore: bool, in_their_scripts: bool = False) -> None:
    """Check, before the host is imported, that it has what this package relies on.

    mindspore: it will compute on MindSpore; in_their_scripts: it runs one of its scripts, not pretrain_dit.py.

    Raises:
        ConfigError: NON_MEGATRON=true asks it to run without Megatron.
        PlatformError: something is missing in it; the error names it.
    """
    if os.environ.get("NON_MEGATRON") == "true":  # (MindSpeed-MM ignores any other value)
        raise ConfigError(
            "NON_MEGATRON = true",
            "with it MindSpeed-MM starts its native engine, without Megatron; this run trains in Megatron",
            "unset NON_MEGATRON, or pass --host mindspeed-mm-native",
        )
    spared = {*CONVERTING, *(() if mindspore else ON_MINDSPORE), *(() if in_their_scripts else IN_THEIR_SCRIPTS)}
    missing = missing_from({module: names for module, names in RELIED_ON.items() if module not in spared})
    if missing:
        raise PlatformError(
            "--host = mindspeed-mm",
            f"what is installed lacks {', '.join(missing)}, which this project relies on",
            f"install a tested pair ({versions.tested_pairs()}) with Megatron-LM {versions.MEGATRON}; "
            "see docs/mindspeed_mm.md",
        )
