"""The training loop: step, log, validate, save, stop."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mindspeed_mm_dit.errors import ConvergenceError, DataError, StepError, UserError
from mindspeed_mm_dit.framework import ops, runtime
from mindspeed_mm_dit.objectives.contract import NOISE_SHARE
from mindspeed_mm_dit.training.contract import Engine, ForwardStep
from mindspeed_mm_dit.training.grids import SampleGrids
from mindspeed_mm_dit.training.log import RunLog, StepRecord
from mindspeed_mm_dit.training.lr import LearningRate
from mindspeed_mm_dit.training.position import leave
from mindspeed_mm_dit.training.profile import Profiling
from mindspeed_mm_dit.training.progress import Progress
from mindspeed_mm_dit.training.signals import Stop, StopRequest
from mindspeed_mm_dit.training.trackers.choose import open_trackers
from mindspeed_mm_dit.training.utilisation import meter
from mindspeed_mm_dit.training.validation import ValidationLoss, sums_by_quarter


def train(
    args: Namespace,
    engine: Engine,
    forward_step: ForwardStep,
    train_batches: Iterator[Any],
    valid_batches: Iterable[Any] | None,
    progress: Progress,
    stop: StopRequest,
) -> Stop | None:
    """Run optimizer steps until --train-iters or until the ranks agree to end, save, and return why they ended.

    ``valid_batches`` is iterated anew for every validation; its batches hold arrays by name, one of them NOISE_SHARE.

    Raises:
        StepError: a step failed, or a validation of several ranks; nothing was saved after it.
        ConvergenceError: the numbers are no longer finite, and are not saved.
    """
    is_last_rank = runtime.rank() == runtime.world_size() - 1
    log = RunLog(
        prints=is_last_rank,
        train_iters=args.train_iters,
        iteration=progress.iteration,
        trackers=open_trackers(args, progress.iteration) if is_last_rank else (),
        mfu=meter(args),
    )
    with contextlib.closing(log):
        return _train(log, args, engine, forward_step, train_batches, valid_batches, progress, stop)


def _train(
    log: RunLog,
    args: Namespace,
    engine: Engine,
    forward_step: ForwardStep,
    train_batches: Iterator[Any],
    valid_batches: Iterable[Any] | None,
    progress: Progress,
    stop: StopRequest,
) -> Stop | None:
    schedule, intervals, profiling = learning_rate(args), Intervals(args, log), Profiling(args)
    grids = SampleGrids(args, log) if args.sample_interval else None
    if progress.iteration >= args.train_iters:
        log.say(f"iteration {progress.iteration} is reached already: nothing to train up to {args.train_iters}")
    while progress.iteration < args.train_iters:
        batches = _next_batches(train_batches, stop)
        if stop.agree():
            break
        lr = schedule.at(progress.iteration)
        profiling.before_step(progress.iteration)
        with _named(f"iteration {progress.iteration + 1}"):
            result = engine.train_step(forward_step, iter(batches), lr)
            intervals.say()  # of the steps before, while the device is busy with this one
        intervals.add(result)
        progress.advance()
        profiling.after_step(progress.iteration)
        log.step()
        if progress.iteration % args.log_interval == 0 or progress.iteration == args.train_iters:
            intervals.close(progress, lr)
        if _is_due(args.eval_interval, progress) and valid_batches is not None and args.eval_iters:
            intervals.say()
            loss = validate(args, engine, forward_step, iter(valid_batches), stop)
            if loss is not None:
                log.validation(progress.iteration, loss)
                if args.keep_best:
                    intervals.check(progress)
                    progress.keep_if_best(loss.mean)
        if grids is not None and _is_due(args.sample_interval, progress):
            intervals.say()
            with _named(f"the samples at iteration {progress.iteration}"):
                grids.draw(engine, progress.iteration)
        if _is_due(args.save_interval, progress):
            intervals.say()
            intervals.check(progress)
            progress.try_save()
    profiling.close()
    ended = stop.agree()
    intervals.say()
    intervals.check(progress)
    if ended:
        saved = "saving it" if args.save else "nothing is saved without --save"
        log.say(f"{ended.reason} at iteration {progress.iteration}: {saved}")
    progress.finish()
    return ended


def _next_batches(batches: Iterator[Any], stop: StopRequest) -> list[Any]:
    """Return this rank's micro-batches of one optimizer step.

    They are all made before the step, so that an error of the reader, which is noted, finds the weights as they were.
    """
    count, own = runtime.num_microbatches(), []
    try:
        own = list(itertools.islice(batches, count))
        if len(own) < count:
            raise DataError("the batches of this run", "have come to an end")
    except Exception as error:  # (a reader's, whatever its kind)
        stop.note(error)
    return own


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    """Turn what goes wrong in ``what`` into an error a user can read."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise StepError(
            what,
            f"failed, and what it left is not saved: {type(error).__name__}: {error}",
            "the last checkpoint stands; resume from it",
        ) from error


def learning_rate(args: Namespace) -> LearningRate:
    """Return the learning rate schedule of the flags."""
    return LearningRate(
        peak=args.lr,
        minimum=args.min_lr,
        init=args.lr_warmup_init,
        warmup_steps=args.lr_warmup_iters,
        decay_steps=args.lr_decay_iters or args.train_iters,
        style=args.lr_decay_style,
    )


def validate(
    args: Namespace, engine: Any, forward_step: Callable[..., Any], batches: Iterator[Any], stop: StopRequest
) -> ValidationLoss | None:
    """Return the loss over --eval-iters global batches, None where something asks the run to end.

    Raises:
        StepError: it failed on one of several ranks; the others may be in the middle of it.
    """
    sums = np.zeros((2, 4))
    for _ in range(args.eval_iters):
        own = _next_batches(batches, stop)
        if stop.agree():
            return None
        try:
            with _named("the validation"):
                losses = ops.numpy(engine.eval_step(forward_step, iter(own)))
                sums += sums_by_quarter(losses, np.concatenate([batch[NOISE_SHARE] for batch in own]))
        except StepError as error:
            if runtime.world_size() > 1:
                raise
            stop.note(error)
            return None
    with _named("the validation"):
        return ValidationLoss.from_sums(_mean_over_ranks(sums))


def _mean_over_ranks(values: np.ndarray) -> np.ndarray:
    """Return the mean of each of ``values`` over all ranks, as float32 has it."""
    means = runtime.mean_over_ranks([ops.tensor(value) for value in values.astype(np.float32).reshape(-1, 1)])
    return np.array([float(mean) for mean in means]).reshape(values.shape)


def _is_due(every: int | None, progress: Progress) -> bool:
    return every is not None and progress.iteration % every == 0


class Intervals:
    """Turns the results of steps into log records without keeping the device waiting.

    Results stay on the device until an interval is closed; then they travel, and are read when they have arrived
    or, at the latest, when the next step is under way.
    """

    def __init__(self, args: Namespace, log: RunLog) -> None:
        self._args, self._log = args, log
        self._results: list[Any] = []
        self._last: Any = None
        self._unread: _Closed | None = None
        self._nan_iterations = 0
        self._started = time.perf_counter()

    def add(self, result: Any) -> None:
        """Keep the result of one step."""
        self._results.append(result)
        self._last = result

    def check(self, progress: Progress) -> None:
        """Look at the last step before its state is saved over a good one.

        Raises:
            ConvergenceError: its loss or gradient is not finite, so the weights are not.
        """
        if self._last is not None:
            values = runtime.read_later([self._last.loss, self._last.grad_norm]).wait()
            _check_finite(values, progress.iteration, self._args.save)

    def close(self, progress: Progress, lr: float) -> None:
        """End the interval with the step just taken, and say what it was like if that is known already."""
        values = runtime.read_later([*(result.loss for result in self._results), self._results[-1].grad_norm])
        self._unread = _Closed(values, progress.iteration, progress.consumed_samples, lr)
        self._results = []
        if values.is_there():
            self.say()

    def say(self) -> None:
        """Log the interval that was closed last, unless that is done.

        Raises:
            ConvergenceError: no step of it had a finite loss.
        """
        if self._unread is not None:
            closed, self._unread = self._unread, None
            self._log.record(self._record(closed))

    def _record(self, closed: _Closed) -> StepRecord:
        *losses, grad_norm = closed.values.wait()
        finite = [loss for loss in losses if math.isfinite(loss)]
        self._nan_iterations += len(losses) - len(finite)
        if not finite:
            _check_finite((losses[-1], grad_norm), closed.iteration, self._args.save)
        started, self._started = self._started, time.perf_counter()
        return StepRecord(
            iteration=closed.iteration,
            train_iters=self._args.train_iters,
            consumed_samples=closed.consumed_samples,
            ms_per_iteration=(self._started - started) * 1000 / len(losses),
            learning_rate=closed.learning_rate,
            global_batch_size=self._args.global_batch_size,
            loss=sum(finite) / len(finite),
            grad_norm=grad_norm,
            nan_iterations=self._nan_iterations,
        )


def _check_finite(loss_and_norm: Sequence[float], iteration: int, save: str | None) -> None:
    loss, norm = loss_and_norm
    if not (math.isfinite(loss) and math.isfinite(norm)):
        leave(save, iteration, loss, norm)
        why = f"; what overflowed: mm-dit replay --checkpoint {save}" if save else ""
        raise ConvergenceError(
            f"iteration {iteration}: loss = {loss}, grad norm = {norm}",
            "is not finite any more, and is not saved",
            f"resume from the last checkpoint with a smaller --lr, or without --bf16{why}",
        )


class _Closed(NamedTuple):
    """An interval whose results are on their way."""

    values: Any
    """PendingRead of the loss of each step and the last gradient norm."""
    iteration: int
    consumed_samples: int
    learning_rate: float
