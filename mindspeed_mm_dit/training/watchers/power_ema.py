"""--power-ema-stds: averages over a share of the run; the engine keeps them, sharded and saved as the weights are.

How far each of them moves after a step is ``checkpoint/power_ema.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_mm_dit.checkpoint import power_ema
from mindspeed_mm_dit.training.watchers.contract import Run, Step, Watcher, WatcherKind


class PowerEmas(Watcher):
    """Has the engine take the weights of each step into each average."""

    def __init__(self, stds: Sequence[float]) -> None:
        self._gammas = [power_ema.exponent(std) for std in stds]

    def after_step(self, run: Run, step: Step) -> None:
        """Take in the weights."""
        run.engine.move_power_emas([power_ema.share(run.progress.iteration, gamma) for gamma in self._gammas])


def _open(run: Run) -> Watcher | None:
    return PowerEmas(run.args.power_ema_stds) if run.args.power_ema_stds else None


KIND = WatcherKind("power_averages", _open)
