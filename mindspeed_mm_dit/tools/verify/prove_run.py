"""``mm-dit prove --run``: recompute steps of a published run, and compare them with its log."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mindspeed_mm_dit.checkpoint.adapting import digest_of_base, read_source
from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.framework import active, runtime
from mindspeed_mm_dit.hosts.preflight import preflight
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.tools.verify.prove import ROUNDINGS, UNITS
from mindspeed_mm_dit.tools.verify.published import NOISY_STEPS, RUN, Published, line_of
from mindspeed_mm_dit.tools.verify.step_trace import StepNumbers, begin, join, script, starting, steps_after
from mindspeed_mm_dit.tools.verify.table import Finding, Tolerances, judge_steps, noise_of
from mindspeed_mm_dit.training.flags import quiet
from mindspeed_mm_dit.training.resume import changes, print_rank_0, run_facts, table_of


def recompute(run: Published, requested: Sequence[int]) -> list[Finding]:
    """Recompute the ``requested`` iterations, compare losses and gradient norms with the log, and print both."""
    iterations = run.iterations_to_check(requested)  # (raises before the ranks join)
    args = join(quiet(run.flags))
    if run.past is None and (table := table_of(changes(run.facts, run_facts(args, 0, 0)))):
        print_rank_0(table)
    log = _named((iteration, run.log[iteration]) for iteration in iterations)
    ours = _named(_recomputed(args, run, iterations))
    noisy = [
        _named(_recomputed(args, run, iterations, draw)) for draw in range(NOISY_STEPS if active() == "pytorch" else 0)
    ]
    findings = judge_steps(ours, log, RUN, Tolerances(0.0 if noisy else 1e-5), noise_of(noisy, ours))
    findings.sort(key=lambda finding: int(finding.which))
    print_rank_0("\n".join([*map(line_of, findings), *others(run.facts, findings)]))
    return findings


def _named(steps: Iterable[tuple[int, tuple[float, float]]]) -> dict[str, np.ndarray]:
    """Return losses and gradient norms by their names in the table."""
    return {f"{kind}/{iteration}": np.asarray(value) for iteration, values in steps for kind, value in zip(RUN, values)}


def described(run: Published) -> dict[str, str]:
    """Return the facts that a card states about ``run``: model, data, weights, versions."""
    args = preflight(quiet(run.flags))
    here = {
        "parameters": f"{parameters_of(args.mm.model).num_elements():,}",
        "data": args.mm.data_digest,
        "versions": ", ".join(f"{name} {run.facts[name]}" for name in runtime.versions() if name in run.facts),
        "taken again with": ", ".join(f"{name} {version}" for name, version in runtime.versions().items()),
    }
    if run.newest is None:
        return here
    weights = read_source(str(run.newest), args.mm.model.predictor).weights
    return {**here, f"weights after iteration {run.newest.name[5:].lstrip('0')}": digest_of_base(weights)[:16]}


def _recomputed(
    args: RunConfig, run: Published, iterations: Sequence[int], draw: int | None = None
) -> Iterator[tuple[int, tuple[float, float]]]:
    """Yield loss and gradient norm of each iteration; with a ``draw``, all numbers are perturbed at random."""
    if draw is not None:  # (replicated, eager, in float32: mathematically the same step)
        args = join(replace(args, use_torch_fsdp2=False, torch_compile=False, bf16=False))
    for checkpoint in dict.fromkeys(map(run.before, iterations)):
        group = [iteration for iteration in iterations if run.before(iteration) == checkpoint]
        start = starting(args, checkpoint)
        engine = begin(args, start)
        losses: dict[int, float] = {}
        for step in _steps(args, engine, start, draw, UNITS["bfloat16" if run.flags.bf16 else "float32"]):
            losses[step.iteration] = step.loss
            if step.iteration in group:
                interval = range(run.first(step.iteration), step.iteration + 1)
                yield step.iteration, (float(np.mean([losses[n] for n in interval])), step.grad_norm)
            if step.iteration == group[-1]:
                break


def _steps(args: RunConfig, engine: Any, start: Any, draw: int | None, unit: float) -> Iterator[StepNumbers]:
    steps = steps_after(args, engine, start, script(lambda losses: None))
    if draw is None:
        yield from steps
        return
    step_record: Any = importlib.import_module(f"mindspeed_mm_dit.tools.verify.{active()}.step_record")
    moved = step_record.RoundingNoise(engine, ROUNDINGS * unit, ROUNDINGS * UNITS["float32"], draw)
    while True:
        moved.begin()
        yield next(steps)


def others(facts: Mapping[str, Any], findings: Sequence[Finding]) -> list[str]:
    """If a digit differs, return the versions that differ here."""
    if all(finding.error == 0.0 for finding in findings):
        return []
    here = runtime.versions()
    return [
        f"{name} {facts[name]} there, {here[name]} here" for name in here if facts.get(name, here[name]) != here[name]
    ]
