"""What this room relies on in the host, as one checked list, and the versions it was run with.

tests/contract compares the list with our imports, and with unpacked trees of the host where there are any.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Mapping
from pathlib import Path

KNOWN_MEGATRON = ("0.12.1",)
KNOWN_MINDSPEED = ("0.12.1",)
KNOWN_MINDSPEED_MM = ("v26.0.0", "master of 2026-08-08 (57069cd5)")
"""MindSpeed-MM itself says version 0.1 in all of them; it is recognised by RELIED_ON."""

RELIED_ON: Mapping[str, Mapping[str, tuple[str, ...] | None]] = {
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
"""Module -> name -> parameters of the function or of the class's constructor (None: not called by us)."""


def version_warnings() -> list[str]:
    """Return a line for each part of the host whose version nobody has run this project with."""
    found = {
        "megatron-core": (_megatron_version(), KNOWN_MEGATRON),
        "mindspeed": (_version("mindspeed"), KNOWN_MINDSPEED),
    }
    return [
        f"warning: {name} {version} is unknown here; known are {', '.join(known)} (docs/mindspeed_mm.md)"
        for name, (version, known) in found.items()
        if version is not None and version not in known
    ]


def _version(distribution: str) -> str | None:
    """Return the version of an installed distribution; None for an unpacked tree on PYTHONPATH."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _megatron_version() -> str | None:
    from megatron.core.package_info import __version__

    return str(__version__)


def where(package: str) -> Path | None:
    """Return the folder of an installed package or unpacked tree."""
    spec = importlib.util.find_spec(package)
    places = spec.submodule_search_locations if spec else None
    return Path(next(iter(places))) if places else None
