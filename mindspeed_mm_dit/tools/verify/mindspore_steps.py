"""A record of an engine's step: the gradients that the optimizer got, and the weights and EMA after it."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from mindspeed_mm_dit.framework.mindspore import runtime
from mindspeed_mm_dit.training.mindspore.engine import Engine
from mindspeed_mm_dit.training.mindspore.flat_optimizer import ParameterGroup

Arrays = dict[str, np.ndarray]
IS_DIVIDED_AFTER = True
"""Whether gradients are divided by the number of micro-batches only after they went back through the modules."""


class StepObserver:
    """Observes ``engine`` from outside. Every worker must make the same calls, and gets whole arrays."""

    def __init__(self, engine: Engine) -> None:
        self.gradients: Arrays = {}
        """Gradients of the first step, by parameter, as the optimizer got them: reduced and clipped."""
        self._engine = engine
        for part in engine.parts:
            part.step = partial(self._step, part, part.step)  # type: ignore[method-assign]

    def tree(self, name: str) -> Arrays:
        """Return the weights ("model") or their EMA ("ema"), by parameter."""
        state = self._engine.state(False)
        return {key[len(name) + 1 :]: array for key, array in state.items() if key.startswith(f"{name}.")}

    def _step(self, part: ParameterGroup, step: Any, gradient: Any, lr: float) -> None:
        if not self.gradients.keys() >= set(part.names):
            self.gradients |= part.named(runtime.to_host(gradient))
        step(gradient, lr)


def whole(tensor: Any) -> np.ndarray:
    """Return a tensor as an array."""
    return runtime.to_host(tensor)


def forget() -> None:
    """Do nothing: no state carries over from one layout to the next."""
