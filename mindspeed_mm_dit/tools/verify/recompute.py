"""Recompute steps of a run of the standalone host: for ``mm-dit replay``, and for ``mm-dit prove --run``.

The steps are the same as in the run, because all random numbers are functions of the sample index.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mindspeed_mm_dit.checkpoint.adapting import base_digest, read_source
from mindspeed_mm_dit.checkpoint.store import read_facts
from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.framework import active, runtime
from mindspeed_mm_dit.hosts.preflight import preflight
from mindspeed_mm_dit.models.composite import DiTModel
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.models.registry import load_encoders
from mindspeed_mm_dit.terminal import logger
from mindspeed_mm_dit.tools.verify.past_run import NOISY_STEPS, RUN, PublishedRun, line_of
from mindspeed_mm_dit.tools.verify.prove import ROUNDINGS, UNITS
from mindspeed_mm_dit.tools.verify.table import Finding, Tolerances, judge_steps, noise_of
from mindspeed_mm_dit.training.contract import ForwardStep, train_valid_batches
from mindspeed_mm_dit.training.data_set import Sample
from mindspeed_mm_dit.training.flags import without_outputs
from mindspeed_mm_dit.training.loop import LearningRate, engine_module
from mindspeed_mm_dit.training.resume import (
    InitialWeights,
    ResumePoint,
    changes,
    check_fits,
    format_changes,
    print_rank_0,
    read_initial_weights,
    run_facts,
)

if TYPE_CHECKING:
    from mindspeed_mm_dit.tools.verify.pytorch_steps import NotFinite
    from mindspeed_mm_dit.training.pytorch.engine import Engine

Tensor = Any


class StepNumbers(NamedTuple):
    """The numbers of a step, as a run logs them."""

    iteration: int
    loss: float
    grad_norm: float
    began_at: int
    """Number of samples before the step."""


def join(args: RunConfig) -> RunConfig:
    """Check the run, join the other ranks, and return the run with its configs."""
    args = preflight(args)
    runtime.initialize(
        args.distributed_backend, args.micro_batch_size, args.global_batch_size, args.context_parallel_size
    )
    return args


def begin(
    args: RunConfig,
    start: ResumePoint | None = None,
    prepare: Callable[[Any], Any] = lambda model: model,
    first: InitialWeights | None = None,
) -> Any:
    """Return the engine of a run that has joined.

    prepare: receives the composite before it is sharded, and returns the one to use. first: the initial weights; None:
    those of the run.
    """
    model = prepare(DiTModel(args.mm.model, *load_encoders(args.mm.model, args.mm.encodes)))
    weights = (first or read_initial_weights(args, start)).weights
    assert args.mm.precision is not None  # (None only inside MindSpeed-MM)
    engine: Any = engine_module().Engine(model, args, args.mm.fsdp2, args.mm.precision, weights)
    if start is not None:
        engine.load(start.path, with_optimizer=not args.no_load_optim)
    return engine


def starting(args: RunConfig, checkpoint: Path | None) -> ResumePoint | None:
    """Return the point from which a run that has joined resumes, checked against its flags; None: the beginning."""
    if checkpoint is None:
        return None
    start = ResumePoint(checkpoint, int(checkpoint.name[5:]), read_facts(checkpoint))
    check_fits(args, start, engine_module().checkpoints)
    return start


def steps_after(args: RunConfig, engine: Any, start: ResumePoint | None, step: ForwardStep) -> Iterator[StepNumbers]:
    """Take the steps of a run after ``start``, one per item of this iterator."""
    done = start.iteration if start else 0
    began_at = (start.facts if start else {}).get("consumed_samples", done * args.global_batch_size)
    batches, _ = train_valid_batches(replace(args, consumed_train_samples=began_at))
    schedule = LearningRate.of(args)
    while True:
        result = engine.train_step(step, batches, schedule.at(done))
        done += 1
        loss, grad_norm = runtime.read_later([result.loss, result.grad_norm]).wait()
        yield StepNumbers(done, loss, grad_norm, began_at)
        began_at += args.global_batch_size


def script(
    see: Callable[[Tensor], None],
    next_batch: Callable[[], None] = lambda: None,
    losses_of: Callable[..., Tensor] = lambda model, batch: model(**batch),
) -> ForwardStep:
    """Return the forward step of pretrain_dit.py; it passes the losses (B,) to ``see``."""

    def loss_func(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = losses.mean()
        return loss, {"loss": runtime.mean_over_ranks([loss])[0]}

    def forward_step(batches: Iterator[Any], model: Any) -> tuple[Tensor, Any]:
        batch = next(batches)
        next_batch()
        losses = losses_of(model, runtime.to_device(batch))
        see(losses)
        return losses, loss_func

    return forward_step


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
        rows = [(unit, *_largest_value(self.largest, unit)) for unit in _units(self.largest, self.blocks)]
        wide = max((len(unit) for unit, *_ in rows), default=0)
        table = [f"  {unit.ljust(wide)}  {value:12.6g}  {module}" for unit, value, module in rows]
        return ["largest activations (unit, value, module):", *table]


def _units(modules: Mapping[str, float], blocks: Sequence[str]) -> list[str]:
    """Return the blocks and the modules outside of them, in the order of their outputs."""
    block_of = {name: block for block in blocks for name in modules if f"{name}.".startswith(f"{block}.")}
    return list(dict.fromkeys(block_of.get(name, name.split(".")[0]) for name in modules if name))


def _largest_value(modules: Mapping[str, float], unit: str) -> tuple[float, str]:
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
    report = _replayed(args, engine, start, iteration)
    print_rank_0(report.head())
    for rank in range(runtime.world_size()):
        if rank == runtime.rank():
            header = [f"rank {rank}:"] if runtime.world_size() > 1 else []
            logger.info("\n".join([*header, *report.lines()]))
        runtime.barrier()
    runtime.shutdown()
    return report.is_finite


def _replayed(args: RunConfig, engine: Engine, start: ResumePoint | None, last: int) -> StepReport:
    """Take steps from ``start`` to ``last``, and report the last one, or the first that is not finite."""
    done = start.iteration if start else 0
    print_rank_0(f"from {start.path if start else 'the beginning'}: {last - done} step(s) to iteration {last}")
    from mindspeed_mm_dit.tools.verify.pytorch_steps import Probe

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
    data, rank, ranks = args.mm.data_set, runtime.data_parallel_rank(), runtime.data_parallel_size()
    sample_indices = data.micro_batches(began_at, args.micro_batch_size, rank, ranks, count)
    return [data.named(indices) for _, indices in zip(range(count), sample_indices)]


def recompute(run: PublishedRun, requested: Sequence[int]) -> list[Finding]:
    """Recompute the ``requested`` iterations, compare losses and gradient norms with the log, and print both."""
    iterations = run.iterations_to_check(requested)  # (raises before the ranks join)
    args = join(without_outputs(run.flags))
    if run.past is None and (table := format_changes(changes(run.facts, run_facts(args, 0, 0)))):
        print_rank_0(table)
    log = _named((iteration, run.log[iteration]) for iteration in iterations)
    ours = _named(_recomputed(args, run, iterations))
    noisy = [
        _named(_recomputed(args, run, iterations, draw)) for draw in range(NOISY_STEPS if active() == "pytorch" else 0)
    ]
    findings = judge_steps(ours, log, RUN, Tolerances(0.0 if noisy else 1e-5), noise_of(noisy, ours))
    findings.sort(key=lambda finding: int(finding.which))
    print_rank_0("\n".join([*map(line_of, findings), *differing_versions(run.facts, findings)]))
    return findings


def _named(steps: Iterable[tuple[int, tuple[float, float]]]) -> dict[str, np.ndarray]:
    """Return losses and gradient norms by their names in the table."""
    return {f"{kind}/{iteration}": np.asarray(value) for iteration, values in steps for kind, value in zip(RUN, values)}


def run_facts_of(run: PublishedRun) -> dict[str, str]:
    """Return the facts that a card states about ``run``: model, data, weights, versions."""
    args = preflight(without_outputs(run.flags))
    here = {
        "parameters": f"{parameters_of(args.mm.model).num_elements():,}",
        "data": args.mm.data_digest,
        "versions": ", ".join(f"{name} {run.facts[name]}" for name in runtime.versions() if name in run.facts),
        "taken again with": ", ".join(f"{name} {version}" for name, version in runtime.versions().items()),
    }
    if run.newest is None:
        return here
    weights = read_source(str(run.newest), args.mm.model.predictor).weights
    return {**here, f"weights after iteration {run.newest.name[5:].lstrip('0')}": base_digest(weights)[:16]}


def _recomputed(
    args: RunConfig, run: PublishedRun, iterations: Sequence[int], draw: int | None = None
) -> Iterator[tuple[int, tuple[float, float]]]:
    """Yield loss and gradient norm of each iteration; with a ``draw``, all numbers are perturbed at random."""
    if draw is not None:  # (replicated, eager, in float32: mathematically the same step)
        args = join(replace(args, use_torch_fsdp2=False, torch_compile=False, bf16=False))
    for checkpoint in dict.fromkeys(map(run.before, iterations)):
        group = [iteration for iteration in iterations if run.before(iteration) == checkpoint]
        start = starting(args, checkpoint)
        engine = begin(args, start)
        losses: dict[int, float] = {}
        for step in _perturbed_steps(args, engine, start, draw, UNITS["bfloat16" if run.flags.bf16 else "float32"]):
            losses[step.iteration] = step.loss
            if step.iteration in group:
                interval = range(run.first(step.iteration), step.iteration + 1)
                yield step.iteration, (float(np.mean([losses[n] for n in interval])), step.grad_norm)
            if step.iteration == group[-1]:
                break


def _perturbed_steps(args: RunConfig, engine: Any, start: Any, draw: int | None, unit: float) -> Iterator[StepNumbers]:
    steps = steps_after(args, engine, start, script(lambda losses: None))
    if draw is None:
        yield from steps
        return
    step_record: Any = importlib.import_module(f"mindspeed_mm_dit.tools.verify.{active()}_steps")
    moved = step_record.RoundingNoise(engine, ROUNDINGS * unit, ROUNDINGS * UNITS["float32"], draw)
    while True:
        moved.begin()
        yield next(steps)


def differing_versions(facts: Mapping[str, Any], findings: Sequence[Finding]) -> list[str]:
    """If a digit differs, return the versions that differ here."""
    if all(finding.error == 0.0 for finding in findings):
        return []
    here = runtime.versions()
    return [
        f"{name} {facts[name]} there, {here[name]} here" for name in here if facts.get(name, here[name]) != here[name]
    ]
