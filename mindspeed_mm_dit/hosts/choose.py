"""Choose the host that runs the training: the one that --host names, or the first that is recognised here.

The choice is made once and reported in one line. A MindSpeed-MM that is installed but broken is an error.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from mindspeed_mm_dit.errors import ConfigError, UserError, nearest
from mindspeed_mm_dit.framework import activate
from mindspeed_mm_dit.framework.exits import end, print_one_line_on_sigint
from mindspeed_mm_dit.framework.launched import check_launched, end_with_launcher
from mindspeed_mm_dit.hosts.contract import Host, HostKind
from mindspeed_mm_dit.hosts.registry import hosts, requested_framework
from mindspeed_mm_dit.terminal import echo_if_open, is_reporting_rank, open_streams

AddFlags = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]


def choose_host(argv: Sequence[str], add_flags: AddFlags | None = None) -> Host:
    """Return the host for ``argv`` and the installed packages, with its framework activated.

    ``add_flags`` adds the flags of the script to a parser. If the host can build its parser without a framework, --help
    is printed here and ends the process with code 0. A UserError is printed and ends it with code 2. From here on a
    Ctrl-C that nothing else handles ends it with one line and code 130; in MindSpeed-MM it raises KeyboardInterrupt
    again.
    """
    open_streams()
    print_one_line_on_sigint()
    end_with_launcher(os.environ)
    try:
        check_launched(os.environ, requested_framework(argv))
    except UserError as error:
        end(error)
    try:
        return find_host(argv, add_flags)
    except UserError as error:
        end(error, collective_error=True)


def find_host(argv: Sequence[str], add_flags: AddFlags | None = None) -> Host:
    """Do the work of :func:`choose_host`, but raise errors.

    Raises:
        PlatformError: the requested host or framework is not installed, or broken.
        UserError: the host cannot run this command line.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--host", default="auto")
    parser.add_argument("-h", "--help", action="store_true")
    args = parser.parse_known_args(list(argv))[0]
    kind = _recognised() if args.host == "auto" else named(args.host)
    if args.help and add_flags and kind.parser:
        add_flags(kind.parser()).print_help()
        sys.exit(0)
    activate(kind.framework(argv))
    kind.needs(argv)
    return kind.attach(argv)


def named(name: str) -> HostKind:
    """Return the host of this name; raises ConfigError for an unknown name."""
    known = {kind.name: kind for kind in hosts()}
    if name not in known:
        names = ("auto", *known)
        raise ConfigError(f"--host = {name}", f"must be one of {', '.join(names)}", nearest(name, names))
    return known[name]


def _recognised() -> HostKind:
    """Return the first host that --host auto selects here; print the notes of the hosts up to it."""
    for kind in hosts():
        is_selected, note = kind.recognised()
        if note and is_reporting_rank():
            echo_if_open(f"note: {note}", file=sys.stderr)
        if is_selected:
            return kind
    raise AssertionError("the standalone host is always selected")
