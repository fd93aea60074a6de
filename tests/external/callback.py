"""A callback as another package brings it: it ends a run whose validations find no smaller loss any more."""

import math

from mindspeed_mm_dit.configs.flag import positive_int
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.training.callbacks.registry import Callback, CallbackSpec


class Patience(Callback):
    def __init__(self, most):
        self._most, self._best, self._since = most, math.inf, 0

    def after_validation(self, run, loss):
        self._since = 0 if loss.mean < self._best else self._since + 1
        self._best = min(self._best, loss.mean)
        if self._since == self._most:
            run.stop.request(f"no smaller validation loss for {self._most} validation(s)")


def check(args, world_size):
    if args.parts["patience"] and not args.eval_interval:
        raise ConfigError(f"--patience = {args.parts['patience']} needs validation. Add --eval-interval N.")


def flags(group):
    group.add_argument("--patience", type=positive_int, metavar="N", help="end after N validations without a new best")


def open_patience(run):
    most = run.args.parts["patience"]
    return Patience(most) if most else None


PATIENCE = CallbackSpec("patience", open_patience, check, flags=flags)
