"""--eval-interval: the loss on held-out samples, over --eval-iters global batches."""

from __future__ import annotations

import numpy as np

from mindspeed_mm_dit.errors import StepError, named_step
from mindspeed_mm_dit.framework import ops, runtime
from mindspeed_mm_dit.objectives.contract import NOISE_LEVEL
from mindspeed_mm_dit.training.batches import next_batches
from mindspeed_mm_dit.training.validation import ValidationLoss, sums_by_quarter
from mindspeed_mm_dit.training.watchers.contract import Run, Step, Watcher, WatcherKind


class Validation(Watcher):
    """Validates every --eval-interval steps, logs the loss, and passes it to the other watchers."""

    def after_step(self, run: Run, step: Step) -> None:
        """Validate if it is due."""
        if run.is_due(run.args.eval_interval):
            run.catch_up()
            loss = validate(run)
            if loss is not None:
                run.log.validation(run.progress.iteration, loss)
                run.tell(lambda watcher: watcher.after_validation(run, loss))


def validate(run: Run) -> ValidationLoss | None:
    """Return the loss over --eval-iters global batches, or None if something asks the run to end.

    Raises:
        StepError: it failed on one of several ranks; the others may be in the middle of it.
    """
    assert run.held_out is not None
    batches, sums = iter(run.held_out), np.zeros((2, 4))
    for _ in range(run.args.eval_iters):
        own = next_batches(batches, run.stop)
        if run.stop.agree():
            return None
        try:
            with named_step("the validation"):
                losses = ops.numpy(run.engine.eval_step(run.forward_step, iter(own)))
                sums += sums_by_quarter(losses, np.concatenate([batch[NOISE_LEVEL] for batch in own]))
        except StepError as error:
            if runtime.world_size() > 1:
                raise
            run.stop.note(error)
            return None
    with named_step("the validation"):
        return ValidationLoss.from_sums(_mean_over_ranks(sums))


def _mean_over_ranks(values: np.ndarray) -> np.ndarray:
    """Return the mean of each of ``values`` over all ranks, computed in float32."""
    means = runtime.mean_over_ranks([ops.tensor(value) for value in values.astype(np.float32).reshape(-1, 1)])
    return np.array([float(mean) for mean in means]).reshape(values.shape)


def _open(run: Run) -> Watcher | None:
    return Validation() if run.args.eval_interval and run.args.eval_iters and run.held_out is not None else None


KIND = WatcherKind("validation", _open)
