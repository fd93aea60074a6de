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
from mindspeed_mm_dit.verify.table import (
    Bound,
    Finding,
    Quantity,
    Rows,
    Tolerances,
    find,
    judge,
    measured,
    relative_error,
    worst,
)
from mindspeed_mm_dit.verify.task import Arrays, Taken

ROUNDINGS = 8
"""By how many roundings a number is moved: a sum of many terms is rounded as often as it has partial sums."""
DRAWS = 3
"""Times that is done; the largest error counts."""
UNDECIDED = 0.25
"""An entry of a gradient that rounding moves by so much of itself may as well have the other sign. An optimizer that
goes by the sign of single entries, as Adam does, steps it either way: such entries are left out of what is compared of
steps and averages."""

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


class Step:
    """Steps in one layout as the table asks for them: how far weights and averages have come, not where they are.

    ``start``: the weights that all layouts begin with; ``counts``: of each parameter, the entries that are compared.
    """

    def __init__(self, taken: Taken, start: Arrays, counts: Arrays | None = None) -> None:
        self.taken, self._start, self._counts = taken, start, counts or {}

    def gradient(self, name: str) -> np.ndarray:
        """Return a parameter's gradient as the optimizer was given it; empty where it was given none."""
        return self.taken.arrays.get(f"gradient/{name}", np.zeros(0))

    def moved(self, tree: str, name: str) -> np.ndarray:
        """Return how far the entries that are compared have come in "model" or "ema"."""
        there = self.taken.arrays.get(f"{tree}/{name}", np.zeros(0))
        if there.shape != self._start[name].shape:
            return there
        way = there.astype(np.float64) - self._start[name]
        return way[self._counts[name]] if name in self._counts else way

    @property
    def parameters(self) -> list[str]:
        """Names of the parameters that have a gradient."""
        return [name.partition("/")[2] for name in self.taken.arrays if name.startswith("gradient/")]

    def numbered(self, name: str) -> list[str]:
        """Return a name for each step: ``loss/1``, ..."""
        return [f"{name}/{number}" for number in range(1, len(self.taken.losses) + 1)]

    def of_each(self, kind: str) -> list[str]:
        """Return a name for each parameter: ``gradient/x_embedder.proj.weight``, ..."""
        return [f"{kind}/{name}" for name in self.parameters]


PROVED: Rows = (
    Quantity(r"loss/(\d+)", lambda s, n: s.taken.losses[int(n) - 1], MEASURED, all_names=lambda s: s.numbered("loss")),
    Quantity(
        r"gradient norm/(\d+)", lambda s, n: s.taken.arrays["grad_norm"][int(n) - 1 : int(n)], MEASURED,
        all_names=lambda s: s.numbered("gradient norm"),
    ),
    Quantity("gradient/(.+)", lambda s, name: s.gradient(name), MEASURED, all_names=lambda s: s.of_each("gradient")),
    Quantity("step/(.+)", lambda s, name: s.moved("model", name), MEASURED, all_names=lambda s: s.of_each("step")),
    Quantity("average/(.+)", lambda s, name: s.moved("ema", name), MEASURED, all_names=lambda s: s.of_each("average")),
)  # fmt: skip
"""What is proved of a layout: the loss of every sample, the norm, every gradient, and where the optimizer moves every
weight and its average."""
KINDS = ("loss", "gradient norm", "gradient", "step", "average")


@dataclass(frozen=True)
class Truth:
    """A step in float64, and what rounding makes of it."""

    taken: Taken
    rounded: Mapping[str, Sequence[Taken]]
    """By precision."""

    @property
    def start(self) -> Arrays:
        """The weights that all layouts begin with."""
        return self.taken.start

    def asked(self, precision: str) -> Tolerances:
        """Return what passes at least."""
        return Tolerances(rounding=2 * ROUNDINGS * UNITS[precision])

    def judge(self, layout: Layout, taken: Taken) -> list[Finding]:
        """Judge every quantity of ``taken`` that has an entry which rounding leaves, in the order of the table."""
        names = Step(self.taken, self.start).parameters
        counts = {name: self._decided(name, layout.precision) for name in names}
        truth, ours = Step(self.taken, self.start, counts), Step(taken, self.start, counts)
        noisy = [Step(each, self.start, counts) for each in self.rounded[layout.precision]]
        return [
            judge(name, row.compute(ours, *groups), values, row.bound, self.asked(layout.precision), noise)
            for name, values in measured(PROVED, truth)
            if values.size
            for row, groups in [_row(name)]
            for noise in [max(relative_error(row.compute(each, *groups), values) for each in noisy)]
        ]

    def _decided(self, name: str, precision: str) -> np.ndarray:
        """Return which entries of a parameter have a gradient that rounding leaves about what it is."""
        truth, *noisy = (each.arrays[f"gradient/{name}"] for each in (self.taken, *self.rounded[precision]))
        moved = np.max([np.abs(each - truth) for each in noisy], 0)
        usual = math.sqrt(float((moved**2).mean()))
        return np.maximum(moved, usual) < UNDECIDED * np.abs(truth)

    def first_wrong(self, taken: Taken, precision: str) -> str:
        """Return in words where a layout parts from the truth, of watched steps."""
        noisy = self.rounded[precision]
        errors = {name: self._past(name, taken, noisy, precision) for name in self.taken.watched}
        wrong = [name for name, is_past in errors.items() if is_past]
        return _words(wrong, set(self.taken.watched))

    def _past(self, name: str, taken: Taken, noisy: Sequence[Taken], precision: str) -> bool:
        values = self.taken.watched[name]
        if name not in taken.watched:
            return False  # (what is compiled is not looked into)
        noise = max(relative_error(each.watched[name], values) for each in noisy)
        return not judge(name, taken.watched[name], values, MEASURED, self.asked(precision), noise).good


def _row(name: str) -> tuple[Quantity, tuple[str, ...]]:
    found = find(PROVED, name)
    assert found is not None, name
    return found


def _words(wrong: Sequence[str], known: set[str]) -> str:
    """Say where it begins, of the wrong inputs, outputs and gradients in the order in which they are computed."""
    kinds = {kind: [name.partition("/")[2] for name in wrong if name.startswith(f"{kind}/")]
             for kind in ("input", "out", "given", "back")}  # fmt: skip
    if kinds["input"]:
        return f"forward: the data: input {kinds['input'][0]} of the network (0 is what is noised, 1 the time)"
    if kinds["out"]:
        return f"forward: module {kinds['out'][0] or 'the network'}"
    culprits = [name for name in kinds["back"] if name not in kinds["given"]]
    if culprits:
        return f"backward: module {culprits[0] or 'the network'}"
    if kinds["given"]:
        return f"backward: behind module {kinds['given'][0] or 'the network'}"
    return AFTER_BACKWARD


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
        return [finding for finding in self.findings if finding.name.partition("/")[0] == kind]

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
