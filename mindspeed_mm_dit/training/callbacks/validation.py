"""--eval-interval.

The loss on held-out samples, over --eval-iters global batches; --keep-best keeps the best checkpoint.
"""

from __future__ import annotations

import numpy as np

from mindspeed_mm_dit import framework
from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.errors import ConfigError, StepError, wrap_step_errors
from mindspeed_mm_dit.objectives.registry import NOISE_LEVEL
from mindspeed_mm_dit.terminal import doing
from mindspeed_mm_dit.training.callbacks.registry import Callback, CallbackSpec, Run, Step
from mindspeed_mm_dit.training.contract import next_batches
from mindspeed_mm_dit.training.log import ValidationLoss, sums_by_quarter


class Validation(Callback):
    """Validates every --eval-interval steps, logs the loss, and passes it to the other callbacks."""

    def after_step(self, run: Run, step: Step) -> None:
        """Validate if it is due."""
        if run.is_due(run.args.eval_interval):
            with doing("validating", run.log.echo):
                loss = validate(run)
            if loss is not None:
                run.log.validation(run.progress.iteration, loss)
                run.notify(lambda callback: callback.after_validation(run, loss))


def validate(run: Run) -> ValidationLoss | None:
    """Return the loss over --eval-iters global batches, or None if the run was requested to stop.

    Raises:
        StepError: it failed on one of several ranks; the others may be in the middle of it.
    """
    assert run.valid_batches is not None
    batches, losses, levels = iter(run.valid_batches), [], []
    for _ in range(run.args.eval_iters):
        micro_batches = next_batches(batches, run.stop)
        if run.stop.agree():
            return None
        try:
            with wrap_step_errors("The validation"):
                losses.append(run.engine.eval_step(run.forward_step, iter(micro_batches)))
                levels += [batch[NOISE_LEVEL] for batch in micro_batches]
        except StepError as error:
            if framework.runtime.world_size() > 1:
                raise
            run.stop.note(error)
            return None
    run.flush()  # on the steps before, while the device is busy with this
    with wrap_step_errors("The validation"):
        sums = sums_by_quarter(
            framework.ops.numpy(framework.ops.cat(losses, 0)), np.concatenate(levels)
        )  # waits for the device, once
        return ValidationLoss.from_sums(framework.runtime.mean_over_ranks_on_cpu(sums).astype(np.float64))


def _open(run: Run) -> Callback | None:
    return Validation() if run.args.eval_interval and run.args.eval_iters and run.valid_batches is not None else None


VALIDATION = CallbackSpec("validation", _open)


class Best(Callback):
    """Saves whenever a validation loss is smaller than all before."""

    def after_validation(self, run: Run, loss: ValidationLoss) -> None:
        """Save if ``loss`` is the smallest."""
        run.progress.keep_if_best(loss.mean, run.check)


def check_best(args: RunConfig, world_size: int) -> None:
    """Raise ConfigError for --keep-best if the run saves or validates nothing."""
    missing = {
        "--save DIR": not args.save,
        "--eval-interval N": not args.eval_interval,
        "--eval-iters of more than 0": not args.eval_iters,
        "dataset_param.valid_fraction in data.json, or --mm-valid-data": not (
            args.mm.data.dataset_param.valid_fraction or args.mm.valid_data
        ),
    }
    needed = [name for name, is_missing in missing.items() if is_missing]
    if args.keep_best and needed:
        raise ConfigError(f"--keep-best keeps the checkpoint of the best validation. Add {' and '.join(needed)}.")


BEST = CallbackSpec("best", lambda run: Best() if run.args.keep_best else None, check_best)
