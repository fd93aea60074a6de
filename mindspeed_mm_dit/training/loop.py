"""The training loop: batches, step, save, until the last step or until the ranks agree to stop.

The callbacks of the run write log lines, validate, sample and so on. The loop calls them at the moments that
``callbacks/registry.py`` lists.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.errors import wrap_step_errors
from mindspeed_mm_dit.framework import active
from mindspeed_mm_dit.training.callbacks.registry import Run, Step
from mindspeed_mm_dit.training.contract import EngineModule, next_batches
from mindspeed_mm_dit.training.signals import StopReason


def engine_module() -> EngineModule:
    """Return the engine module of the active framework."""
    if active() == "mindspore":
        from mindspeed_mm_dit.training.mindspore import engine as mindspore_engine

        return mindspore_engine
    from mindspeed_mm_dit.training.pytorch import engine

    return engine


def train(run: Run, train_batches: Iterator[Any]) -> StopReason | None:
    """Run optimizer steps until --train-iters or until the ranks agree to stop; save, and return why they stopped.

    Raises:
        StepError: a step failed, or a validation on several ranks; nothing was saved after it.
        ConvergenceError: loss or gradient are no longer finite; nothing is saved.
    """
    args, progress = run.args, run.progress
    schedule = LearningRate.of(args)
    if progress.iteration >= args.train_iters:
        run.log.echo(f"iteration {progress.iteration} is reached already: nothing to train up to {args.train_iters}")
    while progress.iteration < args.train_iters:
        started = time.monotonic()
        batches = next_batches(train_batches, run.stop)
        run.data_wait_seconds += time.monotonic() - started
        if run.stop.agree():
            break
        lr = schedule.at(progress.iteration)
        run.notify(lambda callback: callback.before_step(run))
        with wrap_step_errors(f"Iteration {progress.iteration + 1}"):
            result = run.engine.train_step(run.forward_step, iter(batches), lr)
            run.flush()  # on the steps before, while the device is busy with this one
        run.finish_step(Step(result, lr))
        if run.is_due(args.save_interval):
            progress.try_save(run.check)
    return _end(run)


def _end(run: Run) -> StopReason | None:
    """Save the last state, and return why it is the last; None if --train-iters is reached."""
    run.notify(lambda callback: callback.at_end(run))
    stop = run.stop.agree()
    run.check()
    if stop:
        saved = "saving it" if run.args.save else "nothing is saved without --save"
        run.log.echo(f"{stop.reason} at iteration {run.progress.iteration}: {saved}")
    run.progress.finish()
    return stop


@dataclass(frozen=True)
class LearningRate:
    """Linear warm-up from ``init`` to ``peak``, then a decay to ``minimum``."""

    peak: float
    minimum: float
    init: float
    warmup_steps: int
    decay_steps: int
    style: str
    """"constant", "linear", "cosine" or "inverse-square-root"."""

    @classmethod
    def of(cls, args: RunConfig) -> LearningRate:
        """Return the schedule of the flags."""
        return cls(
            peak=args.lr,
            minimum=args.min_lr,
            init=args.lr_warmup_init,
            warmup_steps=args.lr_warmup_iters,
            decay_steps=args.lr_decay_iters or args.train_iters,
            style=args.lr_decay_style,
        )

    def at(self, step: int) -> float:
        """Return the learning rate of the step that follows ``step`` finished ones."""
        if self.warmup_steps > 0 and step <= self.warmup_steps:
            return self.init + (self.peak - self.init) * step / self.warmup_steps
        if self.style == "constant":
            return self.peak
        if step > self.decay_steps:
            return self.minimum
        if self.style == "inverse-square-root":
            return max(self.minimum, self.peak * math.sqrt(max(self.warmup_steps, 1) / max(step, 1)))
        progress = (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
        remaining = 1.0 - progress if self.style == "linear" else 0.5 * (math.cos(math.pi * progress) + 1.0)
        return self.minimum + remaining * (self.peak - self.minimum)
