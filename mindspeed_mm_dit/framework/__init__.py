"""The one interface between this project and PyTorch or MindSpore.

Networks, diffusion maths and samplers are written once, against the names of this package::

    from mindspeed_mm_dit.framework import nn, ops, optim, runtime

``nn`` holds layers, ``ops`` functions of tensors, ``runtime`` devices, ranks and the transport of
tensors, ``optim`` gradients and AdamW. ``activate`` chooses the framework, once, before any of them is
used; without a call, the first use activates PyTorch. ``contract`` lists what each of them must provide.
"""

from __future__ import annotations

import importlib
import re
from types import ModuleType
from typing import TYPE_CHECKING

from mindspeed_mm_dit.errors import PlatformError
from mindspeed_mm_dit.framework.contract import fast_imports

if TYPE_CHECKING:
    from mindspeed_mm_dit.framework.pytorch import nn, ops, optim, runtime

__all__ = ["FRAMEWORKS", "activate", "active", "is_active", "nn", "ops", "optim", "runtime"]

FRAMEWORKS = ("pytorch", "mindspore")

_INSTALL = {
    "pytorch": "Install it with pip install torch, or run make demo, which sets up .venv with it.",
    "mindspore": "Install it with pip install mindspore 'numpy<2', or run make demo-mindspore, which sets up "
    ".venv-mindspore with it. (MSAdapter alone is not enough: this host runs on MindSpore itself.)",
}

_OLDEST = {"pytorch": ("torch", "2.7"), "mindspore": ("mindspore", "2.7")}
"""The oldest supported version (also the requirement in setup.py)."""

_active: str | None = None


def activate(name: str) -> None:
    """Choose the framework ("pytorch" or "mindspore"), once per process.

    Raises:
        PlatformError: the framework is not installed, too old, or another one is active already.
    """
    global _active
    if _active is not None and _active != name:
        raise PlatformError(
            f"--ai-framework = {name} contradicts {_active}, which is active in this process. Use one process per "
            "framework."
        )
    if name not in FRAMEWORKS:
        raise PlatformError(f"--ai-framework = {name} must be one of {', '.join(FRAMEWORKS)}.")
    _check_version(*_OLDEST[name], name)
    try:
        with fast_imports():
            importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        raise PlatformError(f"--ai-framework = {name} cannot be used here: {error}. {_INSTALL[name]}") from error
    _active = name


def _check_version(distribution: str, oldest: str, name: str) -> None:
    import importlib.metadata  # (slow, and this package is imported before Ctrl-C is handled)

    try:
        installed = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:  # not here, or a torch that is MSAdapter
        return
    if tuple(map(int, re.findall(r"\d+", installed)[:2])) < tuple(map(int, oldest.split("."))):
        raise PlatformError(
            f"--ai-framework = {name} needs {distribution} {oldest} or newer, but {installed} is installed. Upgrade it."
        )


def is_active() -> bool:
    """Return whether a framework has been chosen."""
    return _active is not None


def active() -> str:
    """Return the name of the active framework."""
    if _active is None:
        activate("pytorch")
    assert _active is not None
    return _active


def __getattr__(name: str) -> ModuleType:
    if name in ("nn", "ops", "optim", "runtime"):
        return importlib.import_module(f"{__name__}.{active()}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
