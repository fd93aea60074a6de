"""Everything this package relies on in MindSpeed-MM, the check that the host has it.

The tested pairs of releases.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from mindspeed_mm_dit.errors import ConfigError, PlatformError
from mindspeed_mm_dit.integrations.mindspeed_mm.installed import ReliedOn, missing_from, source_of

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
            "NON_MEGATRON = true makes MindSpeed-MM start its native engine, and this run trains in Megatron. Unset "
            "NON_MEGATRON, or pass --host mindspeed-mm-native."
        )
    spared = {*CONVERTING, *(() if mindspore else ON_MINDSPORE), *(() if in_their_scripts else IN_THEIR_SCRIPTS)}
    missing = missing_from({module: names for module, names in RELIED_ON.items() if module not in spared})
    if missing:
        raise PlatformError(
            f"--host = mindspeed-mm needs {', '.join(missing)}, which the installed packages do not have. Install a "
            f"tested pair ({tested_pairs()}) with Megatron-LM {MEGATRON}; see docs/mindspeed_mm.md."
        )


@dataclass(frozen=True)
class VersionMarker:
    """A module that a release has and its predecessor lacks."""

    name: str
    """Name of the release in git."""
    module: str
    """A module that came with it."""


MINDSPEED_MM = (
    VersionMarker("v26.0.0", "mindspeed_mm.fsdp.train.trainer"),
    VersionMarker("v26.1.0", "mindspeed_mm.fsdp.train.training_context"),
    VersionMarker("master (57069cd5)", "mindspeed_mm.fsdp.inference.infer_engine"),
)
MINDSPEED = (
    VersionMarker("93c45456", "mindspeed.core.distributed.torch_fully_sharded_data_parallel.utils"),
    VersionMarker("26.0.0_core_r0.12.1", "mindspeed.core.distributed.torch_fully_sharded_data_parallel.checkpointing"),
    VersionMarker("26.1.0_core_r0.12.1", "mindspeed.core.optimizer.utils"),
    VersionMarker("master (028de58c)", "mindspeed.core.distill.config"),
)
"""Oldest first. A tree counts as the last release whose module it has; a newer tree looks like the last one.

The second release brought MindSpeed's own torch_dcp loader (checkpoint/mindspeed_mm.py and state.py explain the
consequences); the third counts the steps of its AdamW in a plain number.
"""

TESTED = (
    ("v26.0.0", "93c45456"),
    ("v26.0.0", "26.0.0_core_r0.12.1"),
    ("v26.1.0", "26.1.0_core_r0.12.1"),
    ("master (57069cd5)", "master (028de58c)"),
)
"""The pairs that tests/contract was run with (docs/mindspeed_mm.md)."""

MEGATRON = "core_v0.12.1"
TORCH = "2.7.1"
"""Versions that upstream names for each of the pairs."""


def recognise(marks: tuple[VersionMarker, ...]) -> str | None:
    """Return the name of the last of ``marks`` whose module is installed; None for a tree older than all of them."""
    installed = [mark.name for mark in marks if source_of(mark.module) is not None]
    return installed[-1] if installed else None


def tested_pairs() -> str:
    """Return the tested pairs, for a message."""
    return "; ".join(f"MindSpeed-MM {mm} with MindSpeed {mindspeed}" for mm, mindspeed in TESTED)


def warnings(megatron: str) -> list[str]:
    """Return a line for each untested version: of the pair, and of ``megatron``, the version of its core."""
    pair = (recognise(MINDSPEED_MM), recognise(MINDSPEED))
    lines = []
    if pair not in TESTED:
        mm, mindspeed = (name or "older than any tested" for name in pair)
        lines.append(
            f"warning: MindSpeed-MM ({mm}, by its modules) with MindSpeed ({mindspeed}, by its modules) was not "
            f"tested; tested: {tested_pairs()} (docs/mindspeed_mm.md)"
        )
    if f"core_v{megatron}" != MEGATRON:
        lines.append(f"warning: Megatron-LM core_v{megatron} was not tested; tested: {MEGATRON} (docs/mindspeed_mm.md)")
    return lines
