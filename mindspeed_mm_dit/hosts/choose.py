"""Which program runs the training: the real MindSpeed-MM where it is installed, else our standalone host.

MindSpeed-MM has two routes, the old one on Megatron and its native FSDP2 engine. The choice is made once and said in
one line. A MindSpeed-MM that is installed and broken is an error.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from mindspeed_mm_dit.errors import PlatformError, UserError
from mindspeed_mm_dit.framework import FRAMEWORKS, activate
from mindspeed_mm_dit.framework.interrupt import raise_when_interrupted
from mindspeed_mm_dit.framework.launched import check_launched, end_with_launcher, says_it
from mindspeed_mm_dit.hosts.ending import end, end_in_a_line_when_interrupted
from mindspeed_mm_dit.hosts.native.contract import KNOWN_TORCH

HOST_PACKAGES = ("mindspeed", "megatron.training", "mindspeed_mm")
NATIVE = "mindspeed-mm-native"


def choose_host(argv: Sequence[str]) -> ModuleType:
    """Return the module of the host that ``argv`` and the installed packages ask for, framework activated.

    A UserError is printed and ends the process with code 2. From here on a Ctrl-C that nothing else takes ends it
    with one line and code 130; in MindSpeed-MM it raises KeyboardInterrupt again.
    """
    end_in_a_line_when_interrupted()
    end_with_launcher(os.environ)
    try:
        check_launched(os.environ, _wanted(argv).ai_framework)
    except UserError as error:
        end(error)
    try:
        host = find_host(argv)
    except UserError as error:
        end(error, found_by_all=True)
    if host.NAME != "standalone":
        raise_when_interrupted()  # what MindSpeed-MM does then is its own business
    return host


def find_host(argv: Sequence[str]) -> ModuleType:
    """Do what :func:`choose_host` says, and raise.

    Raises:
        PlatformError: the host or framework that was asked for is not here, or broken.
        UserError: MindSpeed-MM is the host, and cannot run what the command line asks for.
    """
    wanted = _wanted(argv)
    missing = [name for name in HOST_PACKAGES if not _is_installed(name)]
    if wanted.host == NATIVE or (wanted.host == "auto" and _prefers_native(missing)):
        return _native(argv)
    if wanted.host == "mindspeed-mm" and missing:
        raise PlatformError(
            "--host = mindspeed-mm",
            f"{', '.join(missing)} cannot be found",
            "install MindSpeed-MM (it is not on PyPI), or leave --host out",
        )
    if wanted.host != "standalone" and not missing:
        activate("pytorch")  # with --ai-framework mindspore too: the host makes `torch` be MSAdapter
        from mindspeed_mm_dit.hosts.megatron.attach import attach

        return attach(argv)
    _note_a_partial_host(missing, wanted.host)
    activate(wanted.ai_framework)
    from mindspeed_mm_dit.hosts import standalone

    return standalone


def _native(argv: Sequence[str]) -> ModuleType:
    os.environ["NON_MEGATRON"] = "true"  # MindSpeed-MM looks at it while it is imported
    activate("pytorch")
    from mindspeed_mm_dit.hosts.native import host

    return host.attach(argv)


def _prefers_native(missing: Sequence[str]) -> bool:
    """Return whether --host auto takes the native engine; where there are two routes, say which it takes and why."""
    if "mindspeed_mm" in missing or not _has_native():
        return False
    asked, is_known = os.environ.get("NON_MEGATRON") == "true", _torch_version() in KNOWN_TORCH
    if asked:
        taken, reason = NATIVE, "NON_MEGATRON is true"
    elif missing and is_known:
        taken, reason = NATIVE, f"{', '.join(missing)} cannot be found, which the old route needs"
    elif missing:
        return False
    else:
        taken, reason = "mindspeed-mm, the old route", "Megatron-LM is here, and NON_MEGATRON is not true"
    if says_it():
        print(f"note: --host auto takes {taken}: {reason}", file=sys.stderr)
    return taken == NATIVE


def _has_native() -> bool:
    """Return whether the folders of the native engine are there; to import a parent would be to start it."""
    specs = [importlib.util.find_spec(name) for name in ("mindspeed", "mindspeed_mm")]
    places = [list(spec.submodule_search_locations or ()) if spec else [] for spec in specs]
    return all(any(os.path.isdir(os.path.join(place, "fsdp")) for place in found) for found in places)


def _torch_version() -> str:
    try:
        return importlib.metadata.version("torch").partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return ""


def _wanted(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--host", default="auto")
    parser.add_argument("--ai-framework", default="pytorch", choices=FRAMEWORKS)
    return parser.parse_known_args(list(argv))[0]


def _note_a_partial_host(missing: Sequence[str], wanted: str) -> None:
    here = [name for name in HOST_PACKAGES if name not in missing]
    if here and missing and wanted == "auto" and says_it():
        print(f"note: {', '.join(here)} found, {', '.join(missing)} not: standalone host", file=sys.stderr)


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False
