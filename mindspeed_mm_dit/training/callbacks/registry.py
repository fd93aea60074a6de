"""Callbacks, which a run calls at fixed moments.

Their interface, and all of them in the order in which they are called. Other packages register theirs with
``register_callback``. A callback never changes a number of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mindspeed_mm_dit.configs.run import RunConfig, check_output_folder
from mindspeed_mm_dit.errors import wrap_step_errors
from mindspeed_mm_dit.registry import Registry

if TYPE_CHECKING:  # (needed for types only, and importing them needs a framework)
    from mindspeed_mm_dit.training.contract import Engine, ForwardStep, StepResult
    from mindspeed_mm_dit.training.log import RunLog, ValidationLoss
    from mindspeed_mm_dit.training.progress import Progress
    from mindspeed_mm_dit.training.signals import StopRequest


class Step(NamedTuple):
    """An optimizer step that has been taken."""

    result: StepResult
    """Loss and gradient norm, on the device: reading them at once waits for the device."""
    lr: float


class Callback:
    """A callback that does nothing; subclasses override the moments they need.

    The moments of one step, in this order; at each of them every callback is called, in the order of the registry::

        before_step(run)              the batches are ready, and no rank requests to stop
        flush(run)                 the device is busy with the step
        after_step(run, step)         the step is counted; its numbers may still be on their way from the device
        after_validation(run, loss)   in the middle of ``after_step``, if there was a validation
        check(run)                    before the state is saved

    ``at_end`` follows the last step of a run that ends in order. Every rank calls the same callbacks at the same steps,
    so a callback may let the ranks communicate, as long as it does so on every rank. A callback that ends the run calls
    ``run.stop.request``.
    """

    def before_step(self, run: Run) -> None:
        """Called after ``run.progress.iteration`` steps, before the next."""

    def flush(self, run: Run) -> None:
        """Report pending results of the steps so far: the device is busy, or a slow operation follows."""

    def after_step(self, run: Run, step: Step) -> None:
        """Called when step ``run.progress.iteration`` is taken."""

    def after_validation(self, run: Run, loss: ValidationLoss) -> None:
        """Called with the loss on the held-out samples, which is the same on every rank."""

    def check(self, run: Run) -> None:
        """Raise a UserError if the present state must not be saved."""

    def at_end(self, run: Run) -> None:
        """Called after the last step of a run that ends in order."""


@dataclass
class Run:
    """The state of a training run that the loop and its callbacks share."""

    args: RunConfig
    """Its flags; ``args.mm`` holds its config files."""
    engine: Engine
    forward_step: ForwardStep
    valid_batches: Iterable[Any] | None
    """Held-out batches, iterated from the start for every validation; each has an array NOISE_LEVEL."""
    progress: Progress
    """Counts steps and samples so far, and saves checkpoints."""
    stop: StopRequest
    """Requests to end the run."""
    log: RunLog
    """Where lines, scalars and pictures go."""
    callbacks: Sequence[Callback] = ()
    data_wait_seconds: float = 0.0
    """Seconds that batches were waited for, since the last log line."""

    def is_due(self, every: int | None) -> bool:
        """Return whether an interval of ``every`` steps ends with the step just taken; never for None and 0."""
        return every is not None and every > 0 and self.progress.iteration % every == 0

    def notify(self, moment: Callable[[Callback], None]) -> None:
        """Call each callback; an error names the callback that it is from."""
        for callback in self.callbacks:
            with wrap_step_errors(f"{type(callback).__name__} at iteration {self.progress.iteration}"):
                moment(callback)

    def finish_step(self, step: Step) -> None:
        """Count a step, and call the callbacks."""
        self.progress.advance()
        self.notify(lambda callback: callback.after_step(self, step))

    def flush(self) -> None:
        """Have the callbacks report the steps so far; call this before something slow, and before printing."""
        self.notify(lambda callback: callback.flush(self))

    def check(self) -> None:
        """Report the steps so far; raise a UserError if a callback forbids saving the present state."""
        self.flush()
        self.notify(lambda callback: callback.check(self))


@dataclass(frozen=True)
class CallbackSpec:
    """A callback as the registry knows it."""

    name: str
    open: Callable[[Run], Callback | None]
    """Returns the callback of a run, or None if its flags do not enable it."""
    check: Callable[[RunConfig, int], None] = lambda args, world_size: None
    """(flags, ranks): raises a UserError for flags that cannot work, before any device work; on every rank."""
    writes: Callable[[RunConfig], tuple[str, Path] | None] = lambda args: None
    """(flag, folder) that it will write to, which is checked before the run; None: it writes nothing."""
    flags: Callable[[Any], None] = lambda group: None
    """Adds its flags to a group of an argument parser."""


CALLBACKS = Registry[CallbackSpec]("callback")
"""All callbacks, in the order in which they are called: those of plugins last."""


def register_callback(kind: CallbackSpec) -> None:
    """Register a callback; its file must import no framework before it is opened.

    Raises:
        ConfigError: another callback has this name.
    """
    CALLBACKS[kind.name] = kind


def open_callbacks(run: Run) -> list[Callback]:
    """Return the callbacks that the flags of ``run`` enable."""
    return [callback for kind in CALLBACKS.values() if (callback := kind.open(run)) is not None]


def check_callbacks(args: RunConfig, world_size: int) -> None:
    """Raise a UserError for flags that a callback cannot act on; the result is the same on every rank."""
    for kind in CALLBACKS.values():
        kind.check(args, world_size)


def check_callback_folders(args: RunConfig) -> None:
    """Raise ConfigError if a callback could not write to its folder."""
    for flag, folder in _output_folders(args):
        check_output_folder(flag, folder, make=False)


def _output_folders(args: RunConfig) -> Iterator[tuple[str, Path]]:
    for kind in CALLBACKS.values():
        if (output := kind.writes(args)) is not None:
            yield output
