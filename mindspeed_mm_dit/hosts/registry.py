"""Hosts, the programs that run the training.

Their interface, and the one that --host names or that is recognised here.
"""

from __future__ import annotations

import argparse
import os
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol

from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.errors import ConfigError, UserError, nearest
from mindspeed_mm_dit.framework import FRAMEWORKS, activate
from mindspeed_mm_dit.framework.contract import lazy_module
from mindspeed_mm_dit.framework.exits import check_launched, end, end_with_launcher, print_one_line_on_sigint
from mindspeed_mm_dit.registry import Registry, register
from mindspeed_mm_dit.terminal import is_reporting_rank, logger, open_streams
from mindspeed_mm_dit.training.flags import standalone_parser

Tensor = Any  # a tensor of the framework
DatasetsProvider = Callable[[Any], tuple[Any, Any, Any]]
"""(numbers of samples) -> micro-batches to train on, to validate on, to test on."""
FlagsProvider = Callable[[ArgumentParser], ArgumentParser]
"""Adds the flags of the training script to a parser."""


class ModelType(Enum):
    """Megatron's ``ModelType`` for runs without Megatron; a DiT is an ``encoder_or_decoder``."""

    encoder_or_decoder = 1


class Host(Protocol):
    """A program that runs the training. Members use Megatron's names if it has them: one script runs in every host."""

    name: str
    """Name in the first line of a run."""
    ModelType: Any
    """Megatron's kinds of model; a DiT is an ``encoder_or_decoder``."""

    def get_args(self) -> RunConfig:
        """Return the flags of this run; ``args.mm`` holds the config files."""

    def print_rank_0(self, message: str, /) -> None:
        """Print on the first rank."""

    def load_encoders(self) -> tuple[Any, Any]:
        """Load the encoders and decoders of this run; the host decides how their weights get into memory."""

    def average_losses_across_data_parallel_group(self, losses: list[Tensor]) -> Any:
        """Average scalar losses over the ranks; the first of the result is the average of the first loss."""

    def pretrain(
        self,
        train_valid_test_dataset_provider: DatasetsProvider,
        model_provider: Callable[..., Any],
        model_type: Any,
        forward_step_func: Callable[..., Any],
        process_non_loss_data_func: Callable[..., Any] | None = None,
        extra_args_provider: FlagsProvider | None = None,
        args_defaults: dict[str, Any] | None = None,
    ) -> None:
        """Train as the command line specifies; print a UserError and end the process with code 2."""


class HostMatch(NamedTuple):
    """Whether --host auto selects a host, and what to print about it."""

    is_selected: bool
    note: str = ""
    """A note to print on the first rank; empty: none."""


@dataclass(frozen=True)
class HostSpec:
    """The registry's record of a host. The host itself is imported only when it is chosen."""

    name: str
    """Value of --host."""
    attach: Callable[[Sequence[str]], Host]
    """Starts the host for a command line; its framework is active by then."""
    detect: Callable[[], HostMatch] = lambda: HostMatch(False)
    """Looks at the installed packages, and decides whether --host auto selects the host."""
    needs: Callable[[Sequence[str]], None] = lambda argv: None
    """Raises PlatformError if something that the host needs is missing."""
    framework: Callable[[Sequence[str]], str] = lambda argv: "pytorch"
    """Returns the framework to activate for a command line."""
    parser: Callable[[], ArgumentParser] | None = None
    """Builds the parser of its flags without a framework, for --help; None: the program that it starts prints help."""
    flags_needed: Callable[[RunConfig], list[str]] = lambda flags: []
    """Returns the flags that a run with ``flags`` needs in addition, as words of a command line."""
    logs_steps: str = ""
    """"module:function" that logs a step, with an argument ``grad_norm``: ``mm-dit prove`` reads the norm there."""
    config_of: Callable[[str, int], str] | None = None
    """(config folder, ranks) -> the text of the host's config file for such a run; None: it has none."""


def requested_framework(argv: Sequence[str]) -> str:
    """Return the framework that --ai-framework names."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--ai-framework", default="pytorch", choices=FRAMEWORKS)
    return str(parser.parse_known_args(list(argv))[0].ai_framework)


STANDALONE = HostSpec(
    "standalone",
    lambda argv: lazy_module("mindspeed_mm_dit.hosts.standalone").Standalone(),
    lambda: HostMatch(True),
    framework=requested_framework,
    parser=standalone_parser,
)
HOSTS = Registry[HostSpec]("host")


def register_host(kind: HostSpec) -> None:
    """Add a host of another package. Its file must import no framework.

    Raises:
        ConfigError: another host has this name.
    """
    if kind.name == "auto":
        raise ConfigError(
            "A host must not be named auto, which means the first host that is recognised. Choose another name."
        )
    register("host", kind.name, kind)


def hosts() -> list[HostSpec]:
    """Return all hosts, in the order in which --host auto tries them: the last registered first, and ours last."""
    return sorted([*HOSTS.values()][::-1], key=lambda kind: kind is STANDALONE)


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
    kind = _detect_host() if args.host == "auto" else host_by_name(args.host)
    if args.help and add_flags and kind.parser:
        add_flags(kind.parser()).print_help()
        sys.exit(0)
    activate(kind.framework(argv))
    kind.needs(argv)
    return kind.attach(argv)


def host_by_name(name: str) -> HostSpec:
    """Return the host of this name; raises ConfigError for an unknown name."""
    known = {kind.name: kind for kind in hosts()}
    if name not in known:
        names = ("auto", *known)
        raise ConfigError(f"--host = {name} must be one of {', '.join(names)}. {nearest(name, names)}")
    return known[name]


def _detect_host() -> HostSpec:
    """Return the first host that --host auto selects here; print the notes of the hosts up to it."""
    for kind in hosts():
        is_selected, note = kind.detect()
        if note and is_reporting_rank():
            logger.warning(f"note: {note}")
        if is_selected:
            return kind
    raise AssertionError("the standalone host is always selected")
