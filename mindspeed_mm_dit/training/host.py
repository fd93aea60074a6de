"""Which program runs the training: the real MindSpeed-MM where it is installed, else our standalone host.

The choice is made once and said in one line. A MindSpeed-MM that is installed and broken is an error.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from types import ModuleType

from mindspeed_mm_dit.errors import PlatformError
from mindspeed_mm_dit.framework import FRAMEWORKS, activate

HOST_PACKAGES = ("mindspeed", "megatron.training", "mindspeed_mm")


def choose_host(argv: Sequence[str]) -> ModuleType:
    """Return the module of the host that ``argv`` and the installed packages ask for, framework activated.

    Raises:
        PlatformError: the host or framework that was asked for is not here.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--host", default="auto")
    parser.add_argument("--ai-framework", default="pytorch", choices=FRAMEWORKS)
    wanted, _ = parser.parse_known_args(list(argv))
    missing = [name for name in HOST_PACKAGES if not _is_installed(name)]
    if wanted.host == "mindspeed-mm" and missing:
        raise PlatformError(
            "--host = mindspeed-mm",
            f"{', '.join(missing)} cannot be found",
            "install MindSpeed-MM (it is not on PyPI), or leave --host out",
        )
    if wanted.host != "standalone" and not missing:
        activate("pytorch")  # with --ai-framework mindspore too: the host makes `torch` be MSAdapter
        from mindspeed_mm_dit.training.mindspeed_mm.attach import attach

        return attach(argv)
    activate(wanted.ai_framework)
    from mindspeed_mm_dit.training import standalone

    return standalone


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False
