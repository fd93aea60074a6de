"""Attach to the engine when it imports this package, and the registry entry of this route.

Imports nothing of it before.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys

from mindspeed_mm_dit.errors import UserError
from mindspeed_mm_dit.framework import activate
from mindspeed_mm_dit.framework.contract import lazy_module
from mindspeed_mm_dit.framework.exits import exits_on_sigint, process_files
from mindspeed_mm_dit.hosts.registry import HostMatch, HostSpec
from mindspeed_mm_dit.integrations.mindspeed_mm.installed import folders, is_installed
from mindspeed_mm_dit.integrations.mindspeed_mm.native.contract import KNOWN_TORCH, NAME, check_engine
from mindspeed_mm_dit.integrations.mindspeed_mm.native.settings import PLUGIN


def attach() -> None:
    """Attach to the running engine; an error is printed by one rank, and ends this process with code 2."""
    activate("pytorch")
    from mindspeed_mm_dit.framework.exits import end

    try:
        check_engine(f"training.plugin: {PLUGIN}")
        from mindspeed_mm_dit.integrations.mindspeed_mm.native import register, run

        run.begin(sys.argv)
        process_files.close()  # (the yaml of a command line has been read)
        register.register()
        run.current().meeting.enter_context(exits_on_sigint())
    except UserError as error:
        end(error, collective_error=True)


def recognised() -> HostMatch:
    """Select the engine if NON_MEGATRON is true, or if Megatron is missing and the engine accepts this PyTorch."""
    if not has_engine():
        return HostMatch(False)
    if os.environ.get("NON_MEGATRON") == "true":
        return HostMatch(True, f"--host auto takes {NAME}: NON_MEGATRON is true")
    if not is_installed("megatron.training") and torch_version() in KNOWN_TORCH:
        return HostMatch(
            True, f"--host auto takes {NAME}: megatron.training cannot be found, which the old route needs"
        )
    return HostMatch(False)


def has_engine() -> bool:
    """Return whether the folders of the engine exist; importing their parent would start the engine."""
    return all(any((folder / "fsdp").is_dir() for folder in folders(name)) for name in ("mindspeed", "mindspeed_mm"))


def torch_version() -> str:
    """Return the version of the installed PyTorch, without the part after a plus sign; empty if there is none."""
    try:
        return importlib.metadata.version("torch").partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return ""


_PACKAGE = "mindspeed_mm_dit.integrations.mindspeed_mm.native"

KIND = HostSpec(
    NAME,
    lambda argv: lazy_module(f"{_PACKAGE}.host").attach(),
    recognised,
    lambda argv: check_engine(),
    logs_steps="mindspeed_mm.fsdp.train.train_engine:TrainEngine.training_log",
    config_of=lambda folder, world_size: lazy_module(f"{_PACKAGE}.run").yaml_of_config(folder, world_size),
)
