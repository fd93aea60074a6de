"""Whether two trainings part as rounding does where a learning rate is high: by a steady factor a step.

A fault parts two trainings at once, or in proportion to the steps; what training amplifies doubles again and again. No
verdict depends on this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mindspeed_mm_dit.evaluation.compare import Check, Finding

ROUNDING = 1e-6
"""Differences up to this are the rounding of float32 sums and of a log of seven digits."""
LEAST_STEPS = 8
"""Fewer say nothing about how differences grow."""
LARGEST_JUMP = 16.0
"""By how much the largest difference so far may grow in a step: losses cross each other, so it does not grow evenly."""
FASTER_THAN = 3
"""Power of the number of steps that it outgrows; weights that drift apart do so in proportion to the steps."""


@dataclass(frozen=True)
class Growth:
    """Differences that double again and again."""

    first: float
    """The largest that is rounding."""
    last: float
    """The largest of all."""
    steps_to_double: float

    def words(self) -> str:
        """Return what to make of it, for a user."""
        return (
            f"differences of the losses double every {self.steps_to_double:.1f} steps, from {self.first:.1e} to "
            f"{self.last:.1e}, while forward pass and gradients agree. So grows rounding where the learning rate is "
            "high, and so may a very small fault of the optimizer. To tell which, compare again with a smaller --lr in "
            "the file of --train-args: rounding then stays below the tolerance"
        )


def steady_growth(losses: Sequence[Finding], checks: Sequence[Check]) -> Growth | None:
    """Return how the differences of the ``losses`` of each step grow, if that is what takes them past tolerance.

    None where another check fails, where the first steps differ by more than rounding, where the differences jump, and
    where they grow no faster than the steps do.
    """
    failed = [check.name for check in checks if not check.good]
    largest = np.maximum.accumulate([max(finding.error, ROUNDING / 8) for finding in losses])  # (a log has no less)
    if failed != ["training"] or len(largest) < LEAST_STEPS or largest[1] > ROUNDING or math.isinf(largest[-1]):
        return None
    begun = int((largest <= ROUNDING).sum())  # the last step whose difference may be that of the log
    ended = int((largest < largest[-1] / 2).sum()) + 1  # after it there is little left to grow
    first, seen, last = (float(largest[step - 1]) for step in (begun, begun + 1, ended))
    if (largest[1:] / largest[:-1]).max() > LARGEST_JUMP or last <= seen * (ended / (begun + 1)) ** FASTER_THAN:
        return None
    return Growth(first, float(largest[-1]), (ended - begun) / math.log2(last / first))
