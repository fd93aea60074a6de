"""Run an entry script of MindSpeed-MM, unmodified, with our models registered; and the registry entry of this route.

Imports nothing of MindSpeed-MM.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Sequence

from mindspeed_mm_dit.errors import PlatformError, UserError
from mindspeed_mm_dit.framework import activate
from mindspeed_mm_dit.framework.contract import lazy_module
from mindspeed_mm_dit.framework.exits import end
from mindspeed_mm_dit.hosts.registry import HostMatch, HostSpec
from mindspeed_mm_dit.integrations.mindspeed_mm.installed import is_installed, tools_json
from mindspeed_mm_dit.integrations.mindspeed_mm.megatron.commandline import uses_mindspore
from mindspeed_mm_dit.integrations.mindspeed_mm.megatron.contract import check_host
from mindspeed_mm_dit.integrations.mindspeed_mm.native.attach import has_engine

COMMAND = "mindspeed_mm_dit.integrations.mindspeed_mm.megatron.run"


def main() -> None:
    """Register our models and run the script ``sys.argv[1]`` in this process."""
    if len(sys.argv) < 2:
        sys.exit(f"usage: python -m {COMMAND} SCRIPT [flags of the script]")
    activate("pytorch")
    script = sys.argv[1]
    sys.argv[:] = sys.argv[1:]
    try:
        check_host(uses_mindspore(sys.argv), in_their_scripts=True)
    except UserError as error:
        sys.exit(error.formatted)
    gate = ("mindspeed_mm.mindspore.mindspore_adaptor",) if uses_mindspore(sys.argv) else ()
    for name in ("torch", "torch_npu", "mindspeed.megatron_adaptor", *gate):
        importlib.import_module(name)
    try:
        importlib.import_module("mindspeed_mm_dit.integrations.mindspeed_mm.megatron.register").register()
    except UserError as error:
        end(error, collective_error=True)
    runpy.run_path(script, run_name="__main__")


NAME = "mindspeed-mm"
PACKAGES = ("mindspeed", "megatron.training", "mindspeed_mm")


def missing_packages() -> list[str]:
    """Return which of its packages are not installed."""
    return [name for name in PACKAGES if not is_installed(name)]


def recognised() -> HostMatch:
    """Select the host if all its packages are installed; add a note if only some are, or the native engine is too."""
    missing = missing_packages()
    installed = [name for name in PACKAGES if name not in missing]
    if missing:
        return HostMatch(
            False, f"{', '.join(installed)} found, {', '.join(missing)} not: standalone host" if installed else ""
        )
    reason = "Megatron-LM is here, and NON_MEGATRON is not true"
    return HostMatch(True, f"--host auto takes {NAME}, the old route: {reason}" if has_engine() else "")


def needs(argv: Sequence[str]) -> None:
    """Raise PlatformError if a part of it is missing, or lacks what this package relies on."""
    if missing := missing_packages():
        raise PlatformError(
            f"--host = {NAME} needs {' and '.join(missing)}, which cannot be found. Install MindSpeed-MM (it is not on "
            "PyPI), or leave --host out."
        )
    check_host(uses_mindspore(argv))


KIND = HostSpec(  # PyTorch for MindSpore too: there `torch` is MSAdapter
    NAME,
    lambda argv: lazy_module("mindspeed_mm_dit.integrations.mindspeed_mm.megatron.attach").attach(argv),
    recognised,
    needs,
    flags_needed=lambda flags: [] if flags.mm_tool else ["--mm-tool", str(tools_json())],
    logs_steps="mindspeed_mm.training:training_log",
)


if __name__ == "__main__":
    main()
