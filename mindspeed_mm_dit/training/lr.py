"""Learning rate as a function of the step, with Megatron's formulas (checked against megatron-core)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mindspeed_mm_dit.configs.run import RunConfig


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
