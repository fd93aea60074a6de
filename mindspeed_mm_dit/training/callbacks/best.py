"""--keep-best: keep the checkpoint with the smallest validation loss so far."""

from __future__ import annotations

from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.training.callbacks.contract import Callback, CallbackKind, Run
from mindspeed_mm_dit.training.validation import ValidationLoss


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
        raise ConfigError("--keep-best", "keeps the checkpoint of the best validation", f"add {' and '.join(needed)}")


BEST = CallbackKind("best", lambda run: Best() if run.args.keep_best else None, check_best)
