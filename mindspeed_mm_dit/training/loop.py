"""The training loop: step, log, validate, save, stop."""

from __future__ import annotations

import math
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mindspeed_mm_dit.errors import ConvergenceError
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.training.log import RunLog, StepRecord
from mindspeed_mm_dit.training.lr import LearningRate
from mindspeed_mm_dit.training.progress import Progress
from mindspeed_mm_dit.training.signals import StopRequest
from mindspeed_mm_dit.training.utilisation import meter


def train(
    args: Namespace,
    engine: Any,
    forward_step: Callable[..., Any],
    train_batches: Iterator[Any],
    valid_batches: Iterable[Any] | None,
    progress: Progress,
    stop: StopRequest,
) -> None:
    """Run optimizer steps until --train-iters or a request to stop, then save.

    ``valid_batches`` is iterated anew for every validation.
    """
    schedule = learning_rate(args)
    is_last_rank = runtime.rank() == runtime.world_size() - 1
    log = RunLog(
        prints=is_last_rank,
        tensorboard_dir=args.tensorboard_dir,
        train_iters=args.train_iters,
        iteration=progress.iteration,
        mfu=meter(args),
    )
    interval = Interval(args)
    while progress.iteration < args.train_iters:
        if stop.on_any_rank():
            log.say(f"asked to stop: saving iteration {progress.iteration}")
            break
        lr = schedule.at(progress.iteration)
        interval.add(engine.train_step(forward_step, train_batches, lr))
        progress.advance()
        log.step()
        if progress.iteration % args.log_interval == 0 or progress.iteration == args.train_iters:
            log.record(interval.close(progress, lr))
        if _is_due(args.eval_interval, progress) and valid_batches is not None and args.eval_iters:
            log.validation(progress.iteration, validate(args, engine, forward_step, iter(valid_batches)))
        if _is_due(args.save_interval, progress):
            progress.try_save()
    progress.finish()
    log.close()


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


def validate(args: Namespace, engine: Any, forward_step: Callable[..., Any], batches: Iterator[Any]) -> float:
    """Return the mean loss over --eval-iters global batches."""
    losses = [float(engine.eval_step(forward_step, batches)) for _ in range(args.eval_iters)]
    return sum(losses) / len(losses)


def _is_due(every: int | None, progress: Progress) -> bool:
    return every is not None and progress.iteration % every == 0


class Interval:
    """Results since the last log line. They stay on the device until the line is due."""

    def __init__(self, args: Namespace) -> None:
        self._args = args
        self._results: list[Any] = []
        self._nan_iterations = 0
        self._started = time.perf_counter()

    def add(self, result: Any) -> None:
        """Keep the result of one step."""
        self._results.append(result)

    def close(self, progress: Progress, lr: float) -> StepRecord:
        """Read the results, and start the next interval.

        Raises:
            ConvergenceError: no step of the interval had a finite loss.
        """
        losses = [float(result.loss) for result in self._results]
        finite = [loss for loss in losses if math.isfinite(loss)]
        self._nan_iterations += len(losses) - len(finite)
        if not finite:
            raise ConvergenceError(
                f"iteration {progress.iteration}: loss = {losses[-1]}",
                "is not finite any more",
                "resume from the last checkpoint with a smaller --lr, or without --bf16",
            )
        now = time.perf_counter()
        record = StepRecord(
            iteration=progress.iteration,
            train_iters=self._args.train_iters,
            consumed_samples=progress.consumed_samples,
            ms_per_iteration=(now - self._started) * 1000 / len(losses),
            learning_rate=lr,
            global_batch_size=self._args.global_batch_size,
            loss=sum(finite) / len(finite),
            grad_norm=float(self._results[-1].grad_norm),
            nan_iterations=self._nan_iterations,
        )
        self._results, self._started = [], now
        return record
