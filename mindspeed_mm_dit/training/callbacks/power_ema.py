"""--power-ema-stds: power-function EMAs; the engine holds them, sharded and saved like the weights.

``checkpoint/power_ema.py`` computes how far each of them moves after a step.
"""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_mm_dit.checkpoint import power_ema
from mindspeed_mm_dit.training.callbacks.registry import Callback, CallbackSpec, Run, Step


class PowerEmas(Callback):
    """Has the engine update each EMA after each step."""

    def __init__(self, stds: Sequence[float]) -> None:
        self._gammas = [power_ema.gamma_of_std(std) for std in stds]

    def after_step(self, run: Run, step: Step) -> None:
        """Update the EMAs."""
        run.engine.update_power_emas([power_ema.decay_weight(run.progress.iteration, gamma) for gamma in self._gammas])


KIND = CallbackSpec("power_ema", lambda run: PowerEmas(run.args.power_ema_stds) if run.args.power_ema_stds else None)
