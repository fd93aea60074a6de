"""--log-interval: the log line, without making the device wait; a step that is not finite is not saved."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from mindspeed_mm_dit.errors import ConvergenceError
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.training.callbacks.registry import Callback, CallbackSpec, Run, Step
from mindspeed_mm_dit.training.dry_run import record_not_finite
from mindspeed_mm_dit.training.log import StepRecord

STARVED_FRACTION, INTERVALS, MIN_INTERVAL_SECONDS = 0.25, 3, 1.0
"""A note is logged once the device has waited for data for this fraction of so many intervals in a row, each at least
this long."""


class LogCallback(Callback):
    """Turns the results of steps into log records.

    Results stay on the device until an interval ends; then they are copied, and read when they have arrived or, at the
    latest, when the next step is under way.
    """

    def __init__(self) -> None:
        self._results: list[Any] = []
        self._last: Any = None
        self._unread: _LogInterval | None = None
        self._nan_iterations = 0
        self._started = time.perf_counter()
        self._seconds, self._starved = 0.0, 0

    def after_step(self, run: Run, step: Step) -> None:
        """Keep the result of the step, and end the interval if it is the last of one."""
        self._results.append(step.result)
        self._last = step.result
        run.log.step()
        if run.is_due(run.args.log_interval) or run.progress.iteration == run.args.train_iters:
            self._close_interval(run, step.lr)

    def _close_interval(self, run: Run, lr: float) -> None:
        """End the interval with the step just taken, and log it if its numbers have arrived already."""
        values = runtime.read_later([*(result.loss for result in self._results), self._last.grad_norm])
        self._unread = _LogInterval(values, run.progress.iteration, run.progress.consumed_samples, lr)
        self._results = []
        if values.is_ready():
            self.flush(run)

    def flush(self, run: Run) -> None:
        """Log the last interval that ended, unless it is logged already.

        Raises:
            ConvergenceError: no step of it had a finite loss.
        """
        if self._unread is not None:
            closed, self._unread = self._unread, None
            was_idle = closed.values.is_ready()  # when the batches of the step now under way had come
            record = self._record(run, closed)
            run.log.record(record)
            self._judge_waiting(run, was_idle)

    def _judge_waiting(self, run: Run, was_idle: bool) -> None:
        """Log a note if the device waits for data. A host that waits while its device is busy costs nothing."""
        waited_fraction, run.data_wait_seconds = (
            min(run.data_wait_seconds / max(self._seconds, MIN_INTERVAL_SECONDS), 1.0),
            0.0,
        )
        self._starved = self._starved + 1 if was_idle and waited_fraction > STARVED_FRACTION else 0
        if self._starved == INTERVALS:
            run.log.echo(
                f"note: {waited_fraction:.0%} of the time the step waits for its data: try more --num-workers (now "
                f"{run.args.num_workers}) if there are idle cores, or smaller files; where a VAE encodes them, mm-dit "
                "cache-latents"
            )

    def check(self, run: Run) -> None:
        """Check the last step before its state is saved over a good one.

        Raises:
            ConvergenceError: its loss or gradient is not finite, so the weights are not either.
        """
        if self._last is not None:
            values = runtime.read_later([self._last.loss, self._last.grad_norm]).wait()
            _check_finite(values, run.progress.iteration, run.args.save)

    def _record(self, run: Run, closed: _LogInterval) -> StepRecord:
        *losses, grad_norm = closed.values.wait()
        finite = [loss for loss in losses if math.isfinite(loss)]
        self._nan_iterations += len(losses) - len(finite)
        if not finite:
            _check_finite((losses[-1], grad_norm), closed.iteration, run.args.save)
        started, self._started = self._started, time.perf_counter()
        self._seconds = self._started - started
        return StepRecord(
            iteration=closed.iteration,
            train_iters=run.args.train_iters,
            consumed_samples=closed.consumed_samples,
            ms_per_iteration=self._seconds * 1000 / len(losses),
            learning_rate=closed.learning_rate,
            global_batch_size=run.args.global_batch_size,
            loss=sum(finite) / len(finite),
            grad_norm=grad_norm,
            nan_iterations=self._nan_iterations,
        )


def _check_finite(loss_and_norm: Sequence[float], iteration: int, save: str | None) -> None:
    loss, norm = loss_and_norm
    if not (math.isfinite(loss) and math.isfinite(norm)):
        record_not_finite(save, iteration, loss, norm)
        why = f" mm-dit replay --checkpoint {save} shows what overflowed." if save else ""
        raise ConvergenceError(
            f"Iteration {iteration} is not saved: its loss = {loss} and grad norm = {norm} are not both finite. Resume "
            f"from the last checkpoint with a smaller --lr, or without --bf16.{why}"
        )


class _LogInterval(NamedTuple):
    """An interval that ended and whose results are being copied."""

    values: Any
    """PendingRead of the loss of each step and the last gradient norm."""
    iteration: int
    consumed_samples: int
    learning_rate: float


KIND = CallbackSpec("lines", lambda run: LogCallback())
