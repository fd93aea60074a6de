"""Is a training step right in every layout? The truth in float64, its rounding, and every layout by both.

The truth is the step on one rank in float64. How far rounding may move each quantity is measured there too: the same
step, with the weights, what every module gives, and every gradient moved at random by ROUNDINGS roundings of the
precision in question. No layout's own arithmetic is asked, so nothing that a layout does wrong can widen its bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mindspeed_mm_dit.verify.first_wrong_module import AFTER_BACKWARD, first_wrong
from mindspeed_mm_dit.verify.layouts import UNITS, Layout
from mindspeed_mm_dit.verify.table import MODULES, STEPS, Bound, Computed, Finding, Tolerances, judge_steps, worst
from mindspeed_mm_dit.verify.task import Arrays, Taken

ROUNDINGS = 8
"""By how many roundings a number is moved: a sum of many terms is rounded as often as it has partial sums."""
DRAWS = 3
"""Times that is done; the largest error counts."""
UNDECIDED = 0.25
"""An entry of a gradient that rounding moves by so much of itself may as well have the other sign. An optimizer that
goes by the sign of single entries, as Adam does, steps it either way: such entries are left out of what is compared of
steps and averages."""

UNWATCHED = "only where modules are not watched: in a compiled graph, or not every time"
_PLACES = {
    "step": "the optimizer: gradients are right, the weights after its step are not",
    "average": "the average: weights are right, their average is not",
    "loss": "after the first step, which is right",
}
"""Where a quantity is made, for what goes wrong after backward."""

MEASURED = Bound(
    f"Measured: twice the largest error of {DRAWS} steps in float64 in which the weights, what every module gives, and "
    f"every gradient were moved at random by up to {ROUNDINGS} roundings; at least twice {ROUNDINGS} roundings."
)


PROVED = dict.fromkeys(STEPS, MEASURED)
"""What is proved of a layout: the loss of every sample, the norm, every gradient, and where the optimizer moves every
weight and its average."""


def computed(taken: Taken, start: Arrays, counts: Arrays) -> Computed:
    """Return what ``taken`` has by the names of the table: how far weights and averages have come, not where they are.

    ``start``: the weights that all layouts begin with; ``counts``: of each parameter, the entries that are compared.
    """
    found = dict(taken.quantities)
    for kind, tree in (("step", "model"), ("average", "ema")):
        for name, counted in counts.items():
            there = taken.arrays.get(f"{tree}/{name}", np.zeros(0))
            fits = there.shape == counted.shape
            found[f"{kind}/{name}"] = (there.astype(np.float64) - start[name])[counted] if fits else there
    return found


@dataclass(frozen=True)
class Truth:
    """A step in float64, and what rounding makes of it."""

    taken: Taken
    rounded: Mapping[str, Sequence[Taken]]
    """By precision."""

    def asked(self, precision: str) -> Tolerances:
        """Return what passes at least."""
        return Tolerances(rounding=2 * ROUNDINGS * UNITS[precision])

    def judge(self, layout: Layout, taken: Taken) -> list[Finding]:
        """Judge every quantity of ``taken``, in the order of the table; last those that rounding leaves no entry of."""
        names = [name[9:] for name in self.taken.arrays if name.startswith("gradient/")]
        counts = {name: self._decided(name, layout.precision) for name in names}
        ours, truth, *noisy = (
            computed(each, self.taken.start, counts) for each in (taken, self.taken, *self.rounded[layout.precision])
        )
        lost = [Finding(name, 0.0, 1.0, 0.0, 0.0) for name, values in truth.items() if not values.size]
        return judge_steps(ours, truth, PROVED, self.asked(layout.precision), noisy) + lost

    def _decided(self, name: str, precision: str) -> np.ndarray:
        """Return which entries of a parameter have a gradient that rounding leaves about what it is."""
        truth, *noisy = (each.arrays[f"gradient/{name}"] for each in (self.taken, *self.rounded[precision]))
        moved = np.max([np.abs(each - truth) for each in noisy], 0)
        usual = math.sqrt(float((moved**2).mean()))
        return np.maximum(moved, usual) < UNDECIDED * np.abs(truth)

    def first_wrong(self, verdict: Verdict, taken: Taken) -> str:
        """Return in words where a layout parts from the truth; ``taken``: its steps again, watched."""
        layout, samples = verdict.layout, len(self.taken.losses[0])
        there = {
            name: values
            for name, values in self.taken.watched.items()
            if name in taken.watched and (len(values) == samples or values.shape == taken.watched[name].shape)
        }  # fmt: skip  (not: what is compiled, and tables of positions of which a rank has its part)
        noisy, bounds = [each.watched for each in self.rounded[layout.precision]], dict.fromkeys(MODULES, MEASURED)
        where = first_wrong(judge_steps(taken.watched, there, bounds, self.asked(layout.precision), noisy))
        if where == AFTER_BACKWARD and verdict.named in {f.name for f in self.judge(layout, taken) if f.good}:
            return UNWATCHED
        return where


class Crashed(str):
    """The last words of a layout's processes that ended before its steps were taken: no bound was asked for."""


@dataclass(frozen=True)
class Verdict:
    """What was found of one layout."""

    layout: Layout
    findings: Sequence[Finding] = ()
    reason: str = ""
    """Why it is not proved, where it is not."""
    where: str = ""
    """Where it parts from the truth, if it does."""
    taken: Taken | None = None

    @property
    def word(self) -> str:
        """PASS, FAIL or "not proved"."""
        if self.reason:
            return "FAIL" if isinstance(self.reason, Crashed) else "not proved"
        return "FAIL" if self.wrong else "PASS" if self.telling else "not proved"

    def of_kind(self, kind: str) -> list[Finding]:
        """Return the findings about one kind of quantity."""
        return [finding for finding in self.findings if finding.kind == kind]

    @cached_property
    def telling(self) -> list[Finding]:
        """What proves something: of the others rounding leaves nothing."""
        return [finding for finding in self.findings if finding.tells]

    @cached_property
    def wrong(self) -> list[Finding]:
        """What is past its bound, in the order of the table."""
        return [finding for finding in self.findings if not finding.good]

    @property
    def named(self) -> str:
        """What is furthest past its bound: a gradient; where those are right a step, an average, or a loss."""
        for kind in ("gradient", "step", "average", "loss", "gradient norm"):
            if found := [finding for finding in self.of_kind(kind) if not finding.good]:
                return worst(found).name
        return ""

    @property
    def place(self) -> str:
        """Where it goes wrong, in words; empty where nobody has looked."""
        return _PLACES.get(self.named.partition("/")[0], self.where) if self.where == AFTER_BACKWARD else self.where
