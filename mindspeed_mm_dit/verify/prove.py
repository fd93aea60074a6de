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

from mindspeed_mm_dit.verify.layouts import UNITS, Layout
from mindspeed_mm_dit.verify.table import STEPS, Bound, Computed, Finding, Tolerances, judge_steps, worst
from mindspeed_mm_dit.verify.task import Arrays, Taken

ROUNDINGS = 8
"""By how many roundings a number is moved: a sum of many terms is rounded as often as it has partial sums."""
DRAWS = 3
"""Times that is done; the largest error counts."""
UNDECIDED = 0.25
"""An entry of a gradient that rounding moves by so much of itself may as well have the other sign. An optimizer that
goes by the sign of single entries, as Adam does, steps it either way: such entries are left out of what is compared of
steps and averages."""

WATCHED = ("input", "out", "given", "back")
"""What the network is given, what a module gives, and the gradients of that and of what it was given."""
AFTER_BACKWARD = "after backward: every module gives and is given back what it should, what follows is wrong"
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


PROVED = {kind: MEASURED for kind in STEPS if kind != "output"}
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
        """Judge every quantity of ``taken`` that has an entry which rounding leaves, in the order of the table."""
        names = [name[9:] for name in self.taken.arrays if name.startswith("gradient/")]
        counts = {name: self._decided(name, layout.precision) for name in names}
        ours, truth, *noisy = (
            computed(each, self.taken.start, counts) for each in (taken, self.taken, *self.rounded[layout.precision])
        )
        return judge_steps(ours, truth, PROVED, self.asked(layout.precision), noisy)

    def _decided(self, name: str, precision: str) -> np.ndarray:
        """Return which entries of a parameter have a gradient that rounding leaves about what it is."""
        truth, *noisy = (each.arrays[f"gradient/{name}"] for each in (self.taken, *self.rounded[precision]))
        moved = np.max([np.abs(each - truth) for each in noisy], 0)
        usual = math.sqrt(float((moved**2).mean()))
        return np.maximum(moved, usual) < UNDECIDED * np.abs(truth)

    def first_wrong(self, taken: Taken, precision: str) -> str:
        """Return in words where a layout parts from the truth, of watched steps."""
        there = {name: values for name, values in self.taken.watched.items() if name in taken.watched}  # (not compiled)
        noisy = [each.watched for each in self.rounded[precision]]
        found = judge_steps(taken.watched, there, dict.fromkeys(WATCHED, MEASURED), self.asked(precision), noisy)
        return _words([finding for finding in found if not finding.good])


def _words(wrong: Sequence[Finding]) -> str:
    """Say where it begins, of the wrong inputs, outputs and gradients in the order in which they are computed."""
    inputs, out, given, back = (
        [finding.which or "the network" for finding in wrong if finding.kind == kind] for kind in WATCHED
    )
    if inputs:
        return f"forward: the data: input {inputs[0]} of the network (0 is what is noised, 1 the time)"
    if out:
        return f"forward: module {out[0]}"
    if culprits := [name for name in back if name not in given]:
        return f"backward: module {culprits[0]}"
    return f"backward: behind module {given[0]}" if given else AFTER_BACKWARD


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
        return "PASS" if all(finding.good for finding in self.findings) else "FAIL"

    def of_kind(self, kind: str) -> list[Finding]:
        """Return the findings about one kind of quantity."""
        return [finding for finding in self.findings if finding.kind == kind]

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
