"""Recompute one step of a run of the standalone host, and report on it.

The step is the same as in the run, because all random numbers are functions of the sample index. The report has the
loss, the samples, the activations, and the first tensor that is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.terminal import logger
from mindspeed_mm_dit.tools.verify.pytorch.step_record import NotFinite, Probe
from mindspeed_mm_dit.tools.verify.step_trace import begin, join, script, starting, steps_after
from mindspeed_mm_dit.training.data_set import Sample
from mindspeed_mm_dit.training.pytorch.engine import Engine
from mindspeed_mm_dit.training.resume import Start, print_rank_0

MAX_SAMPLES_LISTED = 16


@dataclass(frozen=True)
class StepReport:
    """What one rank observed in a step."""

    iteration: int
    loss: float
    grad_norm: float
    not_finite: NotFinite | None
    samples: Sequence[Sequence[Sample]]
    """Samples of each micro-batch of this rank."""
    largest: Mapping[str, float]
    """Module -> largest absolute value in its outputs."""
    blocks: Sequence[str]
    """Names of the network's blocks."""

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradient norm are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    def head(self) -> str:
        """Return the line that is the same on all ranks: loss and gradient norm, as a run prints them."""
        return f"iteration {self.iteration} | loss: {self.loss:.6E} | grad norm: {self.grad_norm:.3f} |"

    def lines(self) -> list[str]:
        """Return the lines about what this rank observed."""
        return [self._first(), *self._samples(), *self._activations()]

    def _first(self) -> str:
        if self.not_finite is None:
            return "every tensor of the network is finite"
        module, tensor, *_ = self.not_finite
        if tensor == "loss":
            return "first not finite: the loss; every output of the network is finite"
        return f"first not finite: {tensor} of {module or 'the predictor'}"

    def _samples(self) -> list[str]:
        bad = self.not_finite
        where = {(bad.micro_batch, row) for row in bad.rows} if bad else set()
        named = [
            (
                f"  {sample.sample_index}  {sample.path}  {sample.label}{' (dropped)' if sample.was_dropped else ''}",
                mark,
            )
            for number, batch in enumerate(self.samples)
            for row, sample in enumerate(batch)
            for mark in [(number, row) in where]
        ]
        listed = [line + "  <- not finite" for line, mark in named if mark]
        listed += [line for line, mark in named if not mark][: max(0, MAX_SAMPLES_LISTED - len(listed))]
        more = len(named) - len(listed)
        return ["samples (index, file, class):", *listed, *([f"  and {more} more"] if more else [])]

    def _activations(self) -> list[str]:
        rows = [(unit, *_largest(self.largest, unit)) for unit in _units(self.largest, self.blocks)]
        wide = max((len(unit) for unit, *_ in rows), default=0)
        table = [f"  {unit.ljust(wide)}  {value:12.6g}  {module}" for unit, value, module in rows]
        return ["largest activations (unit, value, module):", *table]


def _units(modules: Mapping[str, float], blocks: Sequence[str]) -> list[str]:
    """Return the blocks and the modules outside of them, in the order of their outputs."""
    block_of = {name: block for block in blocks for name in modules if f"{name}.".startswith(f"{block}.")}
    return list(dict.fromkeys(block_of.get(name, name.split(".")[0]) for name in modules if name))


def _largest(modules: Mapping[str, float], unit: str) -> tuple[float, str]:
    """Return the largest value in a unit, and the first module that has it; a value that is not finite counts most."""
    inside = [name for name in modules if name == unit or name.startswith(f"{unit}.")]
    name = max(inside, key=lambda name: modules[name] if math.isfinite(modules[name]) else math.inf)
    return modules[name], name


def replay(args: RunConfig, checkpoint: Path | None, iteration: int) -> bool:
    """Compute the steps after ``checkpoint`` up to ``iteration``; print a report of it and return whether it is finite.

    Stops earlier at a step that is not finite, and reports that one. ``checkpoint`` None: from the beginning.
    ``args``: the flags of the run; its batch has the same samples, divided among the ranks there are now.
    """
    args = join(args)
    start = starting(args, checkpoint)
    engine = begin(args, start)
    report = _steps(args, engine, start, iteration)
    print_rank_0(report.head())
    for rank in range(runtime.world_size()):
        if rank == runtime.rank():
            header = [f"rank {rank}:"] if runtime.world_size() > 1 else []
            logger.info("\n".join([*header, *report.lines()]))
        runtime.barrier()
    runtime.shutdown()
    return report.is_finite


def _steps(args: RunConfig, engine: Engine, start: Start | None, last: int) -> StepReport:
    """Take steps from ``start`` to ``last``, and report the last one, or the first that is not finite."""
    done = start.iteration if start else 0
    print_rank_0(f"from {start.path if start else 'the beginning'}: {last - done} step(s) to iteration {last}")
    probe = Probe(engine.predictor)
    probe.begin()
    for step in steps_after(args, engine, start, script(probe.loss, probe.next)):
        if step.iteration == last or not (math.isfinite(step.loss) and math.isfinite(step.grad_norm)):
            samples = _samples(args, step.began_at, runtime.num_microbatches())
            return StepReport(*step[:3], probe.not_finite, samples, probe.largest, parameters_of(args.mm.model).blocks)
        probe.begin()
    raise AssertionError("a run has no end of steps")


def _samples(args: RunConfig, began_at: int, count: int) -> list[list[Sample]]:
    """Return the samples of this rank's ``count`` micro-batches, in the step after the first ``began_at`` samples."""
    data, rank, ranks = args.mm.data_set, runtime.data_rank(), runtime.data_world_size()
    sample_indices = data.micro_batches(began_at, args.micro_batch_size, rank, ranks, count)
    return [data.named(indices) for _, indices in zip(range(count), sample_indices)]
