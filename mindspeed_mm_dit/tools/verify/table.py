"""The table of quantities: what is compared, how a program computes it, and how far two correct programs may differ.

A quantity has a name, ``KIND/WHICH``. ``STEPS`` lists the kinds of training steps, which ``mm-dit compare``, ``prove``
and ``prove --run`` share; the results of steps are a mapping of such names. For a file of reference values, which
``mm-dit parity`` recomputes, a row covers all names of one form, e.g. ``grad_norm/(.+)`` for every parameter. An error
is the norm of the difference over the norm of the reference.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

NOISES = 2.0
"""An error up to this multiple of another correct program's error passes too: two correct float32 programs round
differently, and neither need be nearer to the exact value."""


class Tolerances(NamedTuple):
    """The largest relative errors that pass, as set by the user."""

    rounding: float = 1e-5
    """For quantities in float32."""
    exact: float = 1e-12
    """For quantities that both programs compute in float64."""


DEFAULT_TOLERANCES = Tolerances()


@dataclass(frozen=True)
class Bound:
    """How far two correct programs may differ in a quantity, and why."""

    why: str
    is_exact: bool = False
    """Whether both compute it in float64."""
    least: Callable[[np.ndarray], float] = lambda reference: 0.0
    """Reference -> error that always passes, because better agreement is impossible."""

    def limit(self, reference: np.ndarray, tolerances: Tolerances) -> float:
        """Return the largest error that passes."""
        return max(tolerances.exact if self.is_exact else tolerances.rounding, self.least(reference))


EXACT = Bound("Tables and distributions of times are float64 arithmetic on both sides.", is_exact=True)
FORWARD = Bound(
    "A float32 sum of a thousand terms, added in another order, differs by about 1e-6 of its size, and so do two "
    "implementations of exp, tanh or a normalisation; the embedded default was measured at 4e-7. 1e-5 allows for "
    "tens of layers of that, and is far below what a wrong formula, axis or constant does."
)
GRADIENTS = Bound(
    "A gradient passes through every layer twice, and is held to the same bound parameter by parameter: what a wrong "
    "backward rule changes is one parameter, not the norm over all. The embedded default was measured at 5e-7."
)
TRAINING = Bound(
    "AdamW divides by the root of the mean square, so an entry whose gradient is rounding noise may step the other "
    "way. Over 20 steps of the embedded default that was measured to move the loss by 8e-7 of itself, while "
    "MindSpore's ops.Adam, whose rule differs a little, is 1.1e-5 off after five."
)


STEPS = ("loss", "gradient norm", "gradient", "step", "average")
"""Kinds of quantities of training steps, in the order in which they are computed: by step, the losses and the norm of
all gradients; by parameter, its gradient and the change of the weight and of its EMA."""
MODULES = ("input", "output", "given", "back")
"""Kinds of values that are watched in each module of the network (``module_recorder.py``)."""
BOUNDS: Mapping[str, Bound] = {
    **dict.fromkeys(("input", "output"), FORWARD),
    **dict.fromkeys(("gradient", "given", "back"), GRADIENTS),
    "loss": TRAINING,
}
"""Bounds for the comparison of two frameworks. For layouts, the effect of rounding is measured instead (``prove.py``).
"""
Computed = Mapping[str, np.ndarray]
"""Quantities of training steps by name."""
_MISSING = np.zeros(0)


@dataclass(frozen=True)
class Quantity:
    """A row of the table."""

    names: str
    """Regular expression of the names it covers; the matches of its groups are passed to ``compute``."""
    compute: Callable[..., Any]
    """(program, *groups) -> the values, a tensor or an array."""
    bound: Bound = FORWARD
    needs: str | None = None
    """Flag of the weights that this row needs, if other rows do not."""
    start: Callable[..., np.ndarray] | None = None
    """(program, *groups) -> the common start, if an error is relative to the change from there."""


Rows = tuple[Quantity, ...]


class UnknownQuantity(LookupError):
    """Raised by ``compute`` if a name has the right form but this program lacks the quantity; holds a hint, or ""."""


@dataclass(frozen=True)
class Finding:
    """One quantity of two programs, judged."""

    name: str
    error: float
    """Relative error; infinite for a different shape, and for numbers that are not finite on one side."""
    tolerance: float
    """Largest error that passes."""
    ours: float = math.nan
    """Norm of our values."""
    reference: float = math.nan
    """Norm of the reference."""
    noise: float | None = None
    """Error of another correct program in the same precision, if known."""

    @property
    def good(self) -> bool:
        """Whether the error is within tolerance; an infinite one, of numbers that are not finite, allows nothing."""
        return self.error <= self.tolerance < math.inf

    @property
    def is_conclusive(self) -> bool:
        """Whether the finding proves anything: zeros have an error of 1, so a tolerance of 1 or more proves nothing."""
        return not self.good or self.tolerance < 1

    @property
    def kind(self) -> str:
        """First part of the name."""
        return self.name.partition("/")[0]

    @property
    def which(self) -> str:
        """Rest of the name: a part, a parameter, a step."""
        return self.name.partition("/")[2]


def find_row(rows: Rows, name: str) -> tuple[Quantity, tuple[str, ...]] | None:
    """Return the first row that covers ``name``, and the matches of its groups; None if there is none."""
    matches = ((row, re.fullmatch(row.names, name)) for row in rows)
    return next(((row, match.groups()) for row, match in matches if match), None)


def judge_steps(
    ours: Computed,
    reference: Computed,
    bounds: Mapping[str, Bound] = BOUNDS,
    tolerances: Tolerances = DEFAULT_TOLERANCES,
    noise: Mapping[str, float] = MappingProxyType({}),
) -> list[Finding]:
    """Judge every quantity of the reference whose kind has a bound, in the order of ``bounds``.

    noise: how far rounding alone moves each quantity (:func:`noise_of`); twice as much passes.
    """
    return [
        judge(name, ours.get(name, _MISSING), values, bound, tolerances, noise.get(name))
        for kind, bound in bounds.items()
        for name in reference
        if name.partition("/")[0] == kind
        for values in [reference[name]]
        if values.size
    ]


def noise_of(noisy: Sequence[Computed], exact: Computed) -> dict[str, float]:
    """Return how far results with extra rounding, ``noisy``, are at most from those without it."""
    if not noisy:
        return {}
    there = [name for name in exact if all(name in each for each in noisy)]
    return {name: max(relative_error(each[name], exact[name]) for each in noisy) for name in there}


def judge(
    name: str, ours: np.ndarray, reference: np.ndarray, bound: Bound, tolerances: Tolerances, noise: float | None = None
) -> Finding:
    """Judge ``ours`` against ``reference`` by ``bound``; an error up to twice ``noise`` passes too."""
    tolerance = max(bound.limit(reference, tolerances), NOISES * (noise or 0.0))
    return Finding(name, relative_error(ours, reference), tolerance, _norm(ours), _norm(reference), noise)


def worst(findings: Iterable[Finding]) -> Finding:
    """Return the finding that is furthest past its tolerance, or if none is, closest to it."""

    def excess(finding: Finding) -> float:
        return finding.error / finding.tolerance if 0 < finding.tolerance < math.inf else finding.error

    return max(findings, key=lambda finding: (not finding.good, excess(finding)))


def relative_error(ours: np.ndarray, reference: np.ndarray) -> float:
    """Norm of the difference over norm of the reference; infinite for other shapes or numbers that are not finite.

    Where both have the same infinity, as masks that are added do, it counts as no difference.
    """
    if ours.shape != reference.shape:
        return math.inf
    expected = reference.astype(np.float64)
    if (same := np.isinf(expected) & (ours == expected)).any():
        ours, expected = ours[~same], expected[~same]
    difference, norm = np.linalg.norm((ours - expected).ravel()), np.linalg.norm(expected.ravel())
    return float(difference / (norm or 1.0)) if np.isfinite(difference) else math.inf


def _norm(values: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(values, np.float64).ravel()))
