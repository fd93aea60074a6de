"""What pretrain_dit.py asks of the program that runs the training, and how such a host is made known.

Ours stand in ``registry.hosts``; a plugin of another package calls ``registry.register_host``.
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
    """Megatron's kinds of model, where Megatron is not; a DiT is the first."""

    encoder_or_decoder = 1


class Host(Protocol):
    """Runs the training. What Megatron has too goes by Megatron's names, so that one script runs in every host."""

    @property
    def name(self) -> str:
        """What the first line of a run calls it."""

    @property
    def ModelType(self) -> Any:
        """Megatron's kinds of model; a DiT is an ``encoder_or_decoder``."""

    def get_args(self) -> RunConfig:
        """Return the flags of this run; ``args.mm`` holds the config files."""

    def print_rank_0(self, message: str) -> None:
        """Print on the first rank."""

    def load_encoders(self) -> tuple[Any, Any]:
        """Load what encodes and decodes for this run: how weights get into memory is the host's business."""

    def average_losses_across_data_parallel_group(self, losses: list[Tensor]) -> Any:
        """Average scalar losses over the ranks; the first of the result is that of the first."""

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
        """Train as the command line says; a UserError is printed and ends the process with code 2."""


class Recognised(NamedTuple):
    """Whether --host auto takes a host."""

    is_taken: bool
    note: str = ""
    """What is said of it on the first rank; empty: nothing."""


@dataclass(frozen=True)
class HostKind:
    """A host as the registry knows it. Nothing of it is imported before it is chosen."""

    name: str
    """Value of --host."""
    attach: Callable[[Sequence[str]], Host]
    """Brings it up for a command line; its framework is active by then."""
    recognised: Callable[[], Recognised] = lambda: Recognised(False)
    """Looks at what is installed, and says whether --host auto takes it."""
    needs: Callable[[Sequence[str]], None] = lambda argv: None
    """Raises PlatformError where what it needs is not here."""
    framework: Callable[[Sequence[str]], str] = lambda argv: "pytorch"
    """What ``framework.activate`` is told for a command line."""
    parser: Callable[[], ArgumentParser] | None = None
    """Builds the parser of its flags without a framework, for --help; None: what it starts answers that."""
