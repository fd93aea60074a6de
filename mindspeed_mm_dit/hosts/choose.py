"""Which host runs the training: the one that --host names, or the first that is recognised here.

The choice is made once and said in one line. A MindSpeed-MM that is installed and broken is an error.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from mindspeed_mm_dit.errors import ConfigError, UserError, nearest
from mindspeed_mm_dit.framework import activate
from mindspeed_mm_dit.framework.launched import check_launched, end_with_launcher, says_it
from mindspeed_mm_dit.hosts.contract import Host, HostKind
from mindspeed_mm_dit.hosts.early_exit import end, end_in_a_line_when_interrupted
from mindspeed_mm_dit.hosts.registry import hosts, wanted_framework

AddFlags = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]


def choose_host(argv: Sequence[str], add_flags: AddFlags | None = None) -> Host:
    """Return the host that ``argv`` and the installed packages ask for, framework activated.

    ``add_flags`` adds the script's own flags to a parser: --help of a host that can say it without a framework is
    printed here, and ends the process with 0. A UserError is printed and ends it with code 2. From here on a Ctrl-C
    that nothing else takes ends it with one line and code 130; in MindSpeed-MM it raises KeyboardInterrupt again.
    """
    end_in_a_line_when_interrupted()
    end_with_launcher(os.environ)
    try:
        check_launched(os.environ, wanted_framework(argv))
    except UserError as error:
        end(error)
    try:
        return find_host(argv, add_flags)
    except UserError as error:
        end(error, found_by_all=True)


def find_host(argv: Sequence[str], add_flags: AddFlags | None = None) -> Host:
    """Do what :func:`choose_host` says, and raise.

    Raises:
        PlatformError: the host or framework that was asked for is not here, or broken.
        UserError: the host cannot run what the command line asks for.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--host", default="auto")
    parser.add_argument("-h", "--help", action="store_true")
    asked = parser.parse_known_args(list(argv))[0]
    kind = _recognised() if asked.host == "auto" else named(asked.host)
    if asked.help and add_flags and kind.parser:
        add_flags(kind.parser()).print_help()
        sys.exit(0)
    activate(kind.framework(argv))
    kind.needs(argv)
    return kind.attach(argv)


def named(name: str) -> HostKind:
    """Return the host of this name; ConfigError for one that there is not."""
    known = {kind.name: kind for kind in hosts()}
    if name not in known:
        names = ("auto", *known)
        raise ConfigError(f"--host = {name}", f"is none of {', '.join(names)}", nearest(name, names))
    return known[name]


def _recognised() -> HostKind:
    """Return the first host that is to be taken here; what is worth saying of those up to it is said."""
    for kind in hosts():
        is_taken, note = kind.recognised()
        if note and says_it():
            print(f"note: {note}", file=sys.stderr)
        if is_taken:
            return kind
    raise AssertionError("the standalone host is always taken")
