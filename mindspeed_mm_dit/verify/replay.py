"""What one step was like, computed again: loss, samples, activations, the first tensor that is not finite."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mindspeed_mm_dit.training.replay import NotFinite, Sample

SAMPLES_SHOWN = 16


@dataclass(frozen=True)
class StepReport:
    """A step on one rank."""

    iteration: int
    loss: float
    grad_norm: float
    not_finite: NotFinite | None
    samples: Sequence[Sequence[Sample]]
    """Of each micro-batch of this rank."""
    largest: Mapping[str, float]
    """Module -> largest absolute value in its outputs."""
    stem: str
    """What names of blocks begin with, before their number."""

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradient are."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    def head(self) -> list[str]:
        """Return what all ranks agree on: loss and gradient norm, as a run prints them."""
        return [f"iteration {self.iteration} | loss: {self.loss:.6E} | grad norm: {self.grad_norm:.3f} |"]

    def lines(self) -> list[str]:
        """Return what this rank has seen."""
        return [*self._first(), *self._samples(), *self._activations()]

    def _first(self) -> list[str]:
        if self.not_finite is None:
            return ["every tensor of the network is finite"]
        module, tensor, *_ = self.not_finite
        if tensor == "loss":
            return ["first not finite: the loss; every output of the network is finite"]
        return [f"first not finite: {tensor} of {module or 'the predictor'}"]

    def _samples(self) -> list[str]:
        bad = self.not_finite
        where = {(bad.micro_batch, row) for row in bad.rows} if bad else set()
        named = [
            (f"  {sample.position}  {sample.path}  {sample.label}{' (dropped)' if sample.was_dropped else ''}", mark)
            for number, batch in enumerate(self.samples)
            for row, sample in enumerate(batch)
            for mark in [(number, row) in where]
        ]
        shown = [line + "  <- not finite" for line, mark in named if mark]
        shown += [line for line, mark in named if not mark][: max(0, SAMPLES_SHOWN - len(shown))]
        more = len(named) - len(shown)
        return ["samples (position, file, class):", *shown, *([f"  and {more} more"] if more else [])]

    def _activations(self) -> list[str]:
        rows = [
            (unit, *_largest(self.largest, unit)) for unit in _units(self.largest, self.stem)
        ]  # fmt: skip
        wide = max((len(unit) for unit, *_ in rows), default=0)
        table = [f"  {unit.ljust(wide)}  {value:12.6g}  {module}" for unit, value, module in rows]
        return ["largest activations (unit, value, module):", *table]


def _units(modules: Mapping[str, float], stem: str) -> list[str]:
    """Return the blocks, and what stands beside them, in the order of their outputs."""
    block = re.compile(rf"{re.escape(stem)}\.\d+")
    found = (match[0] if (match := block.match(name)) else name.split(".")[0] for name in modules if name)
    return list(dict.fromkeys(found))


def _largest(modules: Mapping[str, float], unit: str) -> tuple[float, str]:
    """Return the largest value in a unit, and the first module that has it; what is not finite is the largest."""
    inside = [name for name in modules if name == unit or name.startswith(f"{unit}.")]
    name = max(inside, key=lambda name: modules[name] if math.isfinite(modules[name]) else math.inf)
    return modules[name], name
