"""MindSpeed-MM's native FSDP2 engine: when it is taken and what it needs. Nothing of it is imported here."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Sequence

from mindspeed_mm_dit.hosts.contract import Host, HostKind, Recognised
from mindspeed_mm_dit.hosts.installed import folders, is_installed
from mindspeed_mm_dit.hosts.native.contract import KNOWN_TORCH, NAME, check_engine


def recognised() -> Recognised:
    """Take it where the shell asks for it, or where the old route lacks something and PyTorch is one it takes."""
    if not has_engine():
        return Recognised(False)
    if os.environ.get("NON_MEGATRON") == "true":
        return Recognised(True, f"--host auto takes {NAME}: NON_MEGATRON is true")
    if not is_installed("megatron.training") and torch_version() in KNOWN_TORCH:
        reason = "megatron.training cannot be found, which the old route needs"
        return Recognised(True, f"--host auto takes {NAME}: {reason}")
    return Recognised(False)


def has_engine() -> bool:
    """Return whether the folders of the engine are there; to import a parent would be to start it."""
    return all(any((place / "fsdp").is_dir() for place in folders(name)) for name in ("mindspeed", "mindspeed_mm"))


def torch_version() -> str:
    """Return the version of PyTorch that is installed, without what follows a plus sign."""
    try:
        return importlib.metadata.version("torch").partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return ""


def _attach(argv: Sequence[str]) -> Host:
    from mindspeed_mm_dit.hosts.native.host import attach

    return attach()


KIND = HostKind(NAME, _attach, recognised, lambda argv: check_engine())
