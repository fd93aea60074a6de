"""What a watcher is: something that a run calls at fixed moments, and what it is given then.

The moments of one step, in this order; at each of them every watcher is called, in the order of ``registry.kinds``::

    before_step(run)              the batches are there, and no rank asks to end
    catch_up(run)                 the device is busy with the step
    after_step(run, step)         the step is counted; its numbers may still be on their way from the device
    after_validation(run, loss)   in the middle of ``after_step``, where a validation has been taken
    check(run)                    before the state is saved

``at_end`` follows the last step of a run that ends in order. Every rank calls the same watchers at the same steps, so a
watcher may let the ranks meet, as long as it does so on each of them. One that wants the run to end calls
``run.stop.ask``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.errors import named_step

if TYPE_CHECKING:  # (what names these only for their types needs no framework)
    from mindspeed_mm_dit.training.contract import Engine, ForwardStep, StepResult
    from mindspeed_mm_dit.training.log import RunLog
    from mindspeed_mm_dit.training.progress import Progress
    from mindspeed_mm_dit.training.signals import StopRequest
    from mindspeed_mm_dit.training.validation import ValidationLoss


class Step(NamedTuple):
    """An optimizer step that has been taken."""

    result: StepResult
    """Loss and gradient norm, on the device: to read them at once is to wait for it."""
    lr: float


class Watcher:
    """Does nothing at any moment; a watcher overrides what it wants."""

    def before_step(self, run: Run) -> None:
        """Called after ``run.progress.iteration`` steps, before the next."""

    def catch_up(self, run: Run) -> None:
        """Say what there is to say of the steps so far: the device is busy, or something slow comes next."""

    def after_step(self, run: Run, step: Step) -> None:
        """Called when step ``run.progress.iteration`` is taken."""

    def after_validation(self, run: Run, loss: ValidationLoss) -> None:
        """Called with the loss on the samples that are held out; it is the same on every rank."""

    def check(self, run: Run) -> None:
        """Raise a UserError where the state as it is now must not be kept."""

    def at_end(self, run: Run) -> None:
        """Called after the last step of a run that ends in order."""


@dataclass
class Run:
    """A run while it trains: what the loop steps, and what its watchers are given."""

    args: RunConfig
    """Its flags; ``args.mm`` holds its config files."""
    engine: Engine
    forward_step: ForwardStep
    held_out: Iterable[Any] | None
    """Batches that are not trained on, iterated anew for every validation; each has an array NOISE_SHARE."""
    progress: Progress
    """Steps and samples so far, and the way to disk."""
    stop: StopRequest
    """What asks the run to end."""
    log: RunLog
    """Where lines, scalars and pictures go."""
    watchers: Sequence[Watcher] = ()

    def is_due(self, every: int | None) -> bool:
        """Return whether an interval of ``every`` steps ends with the step just taken; None and 0: never."""
        return every is not None and every > 0 and self.progress.iteration % every == 0

    def tell(self, moment: Callable[[Watcher], None]) -> None:
        """Call each watcher; what goes wrong in one of them is named."""
        for watcher in self.watchers:
            with named_step(f"{type(watcher).__name__} at iteration {self.progress.iteration}"):
                moment(watcher)

    def took(self, step: Step) -> None:
        """Count a step, and tell the watchers of it."""
        self.progress.advance()
        self.tell(lambda watcher: watcher.after_step(self, step))

    def catch_up(self) -> None:
        """Have everything said of the steps so far: call it before something slow, and before printing."""
        self.tell(lambda watcher: watcher.catch_up(self))

    def check(self) -> None:
        """Raise a UserError where a watcher forbids to keep the state as it is now."""
        self.tell(lambda watcher: watcher.check(self))


@dataclass(frozen=True)
class WatcherKind:
    """A watcher as the registry knows it."""

    name: str
    open: Callable[[Run], Watcher | None]
    """Makes the watcher of a run; None where its flags do not ask for it."""
    check: Callable[[RunConfig, int], None] = lambda args, world_size: None
    """(flags, ranks): raises a UserError for flags that cannot be acted on, before any device work; on every rank."""
    writes: Callable[[RunConfig], tuple[str, Path] | None] = lambda args: None
    """(flag, folder) that it will write to, which is looked at before the run; None: it writes nothing."""
    flags: Callable[[Any], None] = lambda group: None
    """Adds its flags to a group of an argument parser."""
