"""``mm-dit prove --run``: steps of a run that somebody has published, taken again, held to its log."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mindspeed_mm_dit.checkpoint.adapting import digest_of_base, read_source
from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.framework import active, runtime
from mindspeed_mm_dit.hosts.standalone_preflight import preflight
from mindspeed_mm_dit.hosts.steps import StepTaken, begin, join, script, starting, steps_after
from mindspeed_mm_dit.training.changes import changes, run_facts, table_of
from mindspeed_mm_dit.training.flags import quiet
from mindspeed_mm_dit.training.start import print_rank_0
from mindspeed_mm_dit.verify.layouts import UNITS
from mindspeed_mm_dit.verify.prove import ROUNDINGS
from mindspeed_mm_dit.verify.published import Published
from mindspeed_mm_dit.verify.table import Bound, Finding, Quantity, Rows, Tolerances, judge, relative_error

NOISY_STEPS = 2
"""Times the steps are taken with every number moved; the largest error counts."""
LOGGED = Bound(
    f"Measured: twice the largest error of {NOISY_STEPS} times the same steps in which the weights, what every module "
    f"gives, and every gradient were moved at random by up to {ROUNDINGS} roundings; and the digits that a log prints.",
    least=lambda reference: 5e-7,
)
NORM = Bound(LOGGED.why, least=lambda reference: 5.1e-4 / max(float(np.abs(reference)), 1e-30))
RUN: Rows = (
    Quantity(r"loss/(\d+)", lambda log, n: np.asarray(log[int(n)][0]), LOGGED),
    Quantity(r"gradient norm/(\d+)", lambda log, n: np.asarray(log[int(n)][1]), NORM),
)
"""What a log says of a step."""


def take_again(run: Published, asked: Sequence[int]) -> list[Finding]:
    """Take the steps up to the places ``asked``, and judge their losses and gradient norms by the log; say both."""
    args, places = join(quiet(run.flags)), run.places(asked)
    if run.past is None and (table := table_of(changes(run.facts, run_facts(args, 0, 0)))):
        print_rank_0(table)
    ours = dict(_taken(args, run, places))
    noisy = [dict(_taken(args, run, places, draw)) for draw in range(NOISY_STEPS if active() == "pytorch" else 0)]
    findings = [
        judge(f"{name}/{place}", own, reference, row.bound, Tolerances(0.0 if noisy else 1e-5), max(noise, default=0.0))
        for place in places
        for name, row in zip(("loss", "gradient norm"), RUN)
        for own, reference, *others in [[row.compute(log, str(place)) for log in (ours, run.log, *noisy)]]
        for noise in [[relative_error(other, own) for other in others]]
    ]
    print_rank_0("\n".join([*map(_line, findings), *_others(run.facts, findings)]))
    return findings


def described(run: Published) -> dict[str, str]:
    """Return what a card says of ``run`` in words: model, data, weights, versions."""
    args = preflight(quiet(run.flags))
    here = {
        "parameters": f"{args.mm.model.parameters().num_elements():,}",
        "data": args.mm.pictures,
        "versions": ", ".join(f"{name} {run.facts[name]}" for name in runtime.versions() if name in run.facts),
        "taken again with": ", ".join(f"{name} {version}" for name, version in runtime.versions().items()),
    }
    if run.newest is None:
        return here
    weights = read_source(str(run.newest), args.mm.model.predictor).weights
    return {**here, f"weights after iteration {run.newest.name[5:].lstrip('0')}": digest_of_base(weights)[:16]}


def _taken(
    args: RunConfig, run: Published, places: Sequence[int], draw: int | None = None
) -> Iterator[tuple[int, tuple[float, float]]]:
    """Yield loss and gradient norm of each place; with a ``draw`` all numbers are moved at random."""
    if draw is not None:  # by a rank of its own, whole: that is the same step
        args = join(replace(args, use_torch_fsdp2=False, torch_compile=False, bf16=False))
    for checkpoint in dict.fromkeys(map(run.before, places)):
        own = [place for place in places if run.before(place) == checkpoint]
        start = starting(args, checkpoint)
        engine = begin(args, start)
        losses: dict[int, float] = {}
        for step in _steps(args, engine, start, draw, UNITS["bfloat16" if run.flags.bf16 else "float32"]):
            losses[step.iteration] = step.loss
            if step.iteration in own:
                interval = range(run.first(step.iteration), step.iteration + 1)
                yield step.iteration, (float(np.mean([losses[n] for n in interval])), step.grad_norm)
            if step.iteration == own[-1]:
                break


def _steps(args: RunConfig, engine: Any, start: Any, draw: int | None, unit: float) -> Iterator[StepTaken]:
    steps = steps_after(args, engine, start, script(lambda losses: None))
    if draw is None:
        yield from steps
        return
    room: Any = importlib.import_module(f"mindspeed_mm_dit.training.{active()}.seen")
    moved = room.Roundings(engine, ROUNDINGS * unit, ROUNDINGS * UNITS["float32"], draw)
    while True:
        moved.begin()
        yield next(steps)


def _line(finding: Finding) -> str:
    kind, _, place = finding.name.partition("/")
    digits = ".6E" if kind == "loss" else ".3f"
    ours, logged = format(finding.ours, digits), format(finding.reference, digits)
    printed = RUN[kind != "loss"].bound.least(np.asarray(finding.reference))
    how = f"error {finding.error:.1e}, bound {finding.tolerance:.1e}"
    if ours == logged or finding.error <= printed:
        how = "the same digits" if ours == logged else "the same but for the last digit"
    word = "PASS" if finding.good else "FAIL"
    return f"{word}  iteration {place:>6}  {kind:13}  {ours} here, {logged} in the log: {how}"


def _others(facts: Mapping[str, Any], findings: Sequence[Finding]) -> list[str]:
    """Say which versions are others here, where digits are."""
    if all(finding.error == 0.0 for finding in findings):
        return []
    here = runtime.versions()
    return [
        f"{name} {facts[name]} there, {here[name]} here" for name in here if facts.get(name, here[name]) != here[name]
    ]
