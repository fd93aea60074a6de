"""Start MindSpeed-MM, with its imports in the order it requires."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from mindspeed_mm_dit import __version__
from mindspeed_mm_dit.errors import PlatformError, UserError
from mindspeed_mm_dit.framework.exits import raise_when_interrupted, set_single_process_variables
from mindspeed_mm_dit.hosts.registry import Host
from mindspeed_mm_dit.integrations.mindspeed_mm.installed import package_folder
from mindspeed_mm_dit.integrations.mindspeed_mm.megatron import contract
from mindspeed_mm_dit.integrations.mindspeed_mm.megatron.commandline import complete, launch_rank, uses_mindspore
from mindspeed_mm_dit.integrations.mindspeed_mm.megatron.preflight import check_before_import, spelled_out
from mindspeed_mm_dit.terminal import logger

PACKAGE = "mindspeed_mm_dit.integrations.mindspeed_mm.megatron"


def attach(argv: Sequence[str]) -> Host:
    """Import MindSpeed-MM and return the host on top of it.

    Checks and completes the command line first, because the host reads it while it is imported.

    Raises:
        UserError: the command line or a config file cannot be used.
        PlatformError: the host is installed but broken, or lacks what we rely on; the cause is named.
    """
    mm = check_before_import(argv)
    words = list(argv)
    sys.argv[1:] = complete(spelled_out(argv))
    if "MS_WORKER_NUM" not in os.environ:  # (msrun sets its own variables)
        set_single_process_variables()
    for name in import_order(uses_mindspore(argv)):
        try:
            importlib.import_module(name)
        except UserError:
            raise
        except Exception as error:  # (whatever a broken installation raises)
            raise _broken(name, error) from error
    _announce()
    from mindspeed_mm_dit.integrations.mindspeed_mm.megatron.host import MindSpeedMM

    raise_when_interrupted()  # (during training MindSpeed-MM handles signals itself)
    return MindSpeedMM(words, mm)


def _broken(name: str, error: Exception) -> PlatformError:
    """Return the error to report if the import of ``name`` failed with ``error``."""
    torch = getattr(sys.modules.get("torch"), "__version__", "none")
    return PlatformError(
        f"--host = mindspeed-mm is installed, but importing {name} fails with {type(error).__name__}: {error}. Repair "
        f"the installation (PyTorch {torch} is here, MindSpeed-MM asks for {contract.TORCH}; docs/mindspeed_mm.md "
        "lists versions that go together), or pass --host standalone."
    )


def _announce() -> None:
    if launch_rank()[0] == 0:
        logger.info(f"mindspeed_mm_dit {__version__}, host: MindSpeed-MM in {package_folder('mindspeed_mm')}")
        from megatron.core.package_info import __version__ as megatron

        for line in contract.warnings(str(megatron)):
            logger.warning(line)


def import_order(mindspore: bool) -> tuple[str, ...]:
    """Return the modules to import, in MindSpeed-MM's order; mindspore: whether the run uses MindSpore."""
    gate = ("mindspeed_mm.mindspore.mindspore_adaptor",) if mindspore else ()
    return (
        "torch",
        "torch_npu",
        "mindspeed.megatron_adaptor",
        *gate,
        f"{PACKAGE}.composite",
        "mindspeed_mm.patchs.torch_dcp_patch",
        f"{PACKAGE}.host",
    )
