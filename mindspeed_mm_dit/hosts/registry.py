"""The registry of hosts, in the order in which --host auto looks for them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.framework import FRAMEWORKS
from mindspeed_mm_dit.framework.lazy_imports import later
from mindspeed_mm_dit.hosts.contract import HostKind, Recognised
from mindspeed_mm_dit.registry import Registry, register
from mindspeed_mm_dit.training.flags import standalone_parser


def requested_framework(argv: Sequence[str]) -> str:
    """Return the framework that --ai-framework names."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--ai-framework", default="pytorch", choices=FRAMEWORKS)
    return str(parser.parse_known_args(list(argv))[0].ai_framework)


STANDALONE = HostKind(
    "standalone",
    lambda argv: later("mindspeed_mm_dit.hosts.standalone").Standalone(),
    lambda: Recognised(True),
    framework=requested_framework,
    parser=standalone_parser,
)
HOSTS = Registry[HostKind]("host")


def register_host(kind: HostKind) -> None:
    """Add a host of another package. Its file must import no framework.

    Raises:
        ConfigError: another host has this name.
    """
    if kind.name == "auto":
        raise ConfigError("host auto", "means the first host that is recognised", "choose another name")
    register("host", kind.name, kind)


def hosts() -> list[HostKind]:
    """Return all hosts, in the order in which --host auto tries them: the last registered first, and ours last."""
    return sorted([*HOSTS.values()][::-1], key=lambda kind: kind is STANDALONE)
