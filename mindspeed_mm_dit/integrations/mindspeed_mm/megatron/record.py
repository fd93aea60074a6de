"""Registry entry of MindSpeed-MM's Megatron route: when it is selected and what it needs. Imports nothing of it."""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_mm_dit.errors import PlatformError
from mindspeed_mm_dit.framework.lazy_imports import later
from mindspeed_mm_dit.hosts.contract import HostKind, Recognised
from mindspeed_mm_dit.integrations.mindspeed_mm.installed import is_installed, tools_json
from mindspeed_mm_dit.integrations.mindspeed_mm.megatron.commandline import wants_mindspore
from mindspeed_mm_dit.integrations.mindspeed_mm.megatron.contract import check_host
from mindspeed_mm_dit.integrations.mindspeed_mm.native.record import has_engine

NAME = "mindspeed-mm"
PACKAGES = ("mindspeed", "megatron.training", "mindspeed_mm")


def missing_packages() -> list[str]:
    """Return which of its packages are not installed."""
    return [name for name in PACKAGES if not is_installed(name)]


def recognised() -> Recognised:
    """Select the host if all its packages are installed; add a note if only some are, or the native engine is too."""
    missing = missing_packages()
    installed = [name for name in PACKAGES if name not in missing]
    if missing:
        return Recognised(
            False, f"{', '.join(installed)} found, {', '.join(missing)} not: standalone host" if installed else ""
        )
    reason = "Megatron-LM is here, and NON_MEGATRON is not true"
    return Recognised(True, f"--host auto takes {NAME}, the old route: {reason}" if has_engine() else "")


def needs(argv: Sequence[str]) -> None:
    """Raise PlatformError if a part of it is missing, or lacks what this package relies on."""
    if missing := missing_packages():
        raise PlatformError(
            f"--host = {NAME}",
            f"{', '.join(missing)} cannot be found",
            "install MindSpeed-MM (it is not on PyPI), or leave --host out",
        )
    check_host(wants_mindspore(argv))


KIND = HostKind(  # PyTorch for MindSpore too: there `torch` is MSAdapter
    NAME,
    lambda argv: later("mindspeed_mm_dit.integrations.mindspeed_mm.megatron.attach").attach(argv),
    recognised,
    needs,
    flags_needed=lambda flags: [] if flags.mm_tool else ["--mm-tool", str(tools_json())],
    logs_steps="mindspeed_mm.training:training_log",
)
