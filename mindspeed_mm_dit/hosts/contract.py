"""The interface between pretrain_dit.py and a host, the program that runs the training, and the record of a host.

``registry.hosts`` lists ours; a plugin of another package calls ``registry.register_host``.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol

from mindspeed_mm_dit.configs.run import RunConfig

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

    @property
    def name(self) -> str:
        """Name in the first line of a run."""

    @property
    def ModelType(self) -> Any:
        """Megatron's kinds of model; a DiT is an ``encoder_or_decoder``."""

    def get_args(self) -> RunConfig:
        """Return the flags of this run; ``args.mm`` holds the config files."""

    def print_rank_0(self, message: str) -> None:
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


class Recognised(NamedTuple):
    """Whether --host auto selects a host, and what to print about it."""

    is_selected: bool
    note: str = ""
    """A note to print on the first rank; empty: none."""


@dataclass(frozen=True)
class HostKind:
    """The registry's record of a host. The host itself is imported only when it is chosen."""

    name: str
    """Value of --host."""
    attach: Callable[[Sequence[str]], Host]
    """Starts the host for a command line; its framework is active by then."""
    recognised: Callable[[], Recognised] = lambda: Recognised(False)
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
