"""Compare the step traces of two machines (``step_trace.py``): where do they first differ?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

from mindspeed_mm_dit.errors import DataError
from mindspeed_mm_dit.tools.verify.compare import JUDGED, Comparison
from mindspeed_mm_dit.tools.verify.pairs import Names, Pairing, parameters_paired
from mindspeed_mm_dit.tools.verify.prove import ROUNDINGS, signs_are_certain
from mindspeed_mm_dit.tools.verify.step_trace import Recorded, read
from mindspeed_mm_dit.tools.verify.table import MODULES, Bound, Finding, Tolerances, judge_steps, relative_error

MEASURED = Bound(
    "Measured on both machines: each repeated its step with the weights, the outputs of every module, and every "
    f"gradient perturbed at random by up to {ROUNDINGS} roundings. Twice the larger of the two errors is the bound; at "
    f"least twice {ROUNDINGS} roundings. A weight's change may differ as its gradient may, and by its own rounding."
)
_OPTIONAL = ("loss/", "average/", *(f"{kind}/" for kind in MODULES))
"""Quantities that may be missing on one side: a loss or average was not passed, or the modules are compiled."""
KINDS = dict.fromkeys((*MODULES, *JUDGED), MEASURED)


def compare_traces(first: str, second: str, names: Names | None = None) -> Comparison:
    """Compare two step traces; the first is the reference.

    names: parameter or module in the second -> its name in the first, if they differ.

    Raises:
        UserError: a folder is not a whole step trace, or the two differ in weights, inputs, ranks or micro-batches.
    """
    theirs, mine = read(first), read(second)
    (their_steps, their_ranks), (steps, ranks) = max(theirs), max(mine)
    _check_same_number(f"{first} and {second} have", "ranks", their_ranks + 1, ranks + 1)
    findings, where, when = list[Finding](), dict[str, str](), ""
    settled: dict[int, dict[str, Any]] = defaultdict(dict)
    for step in range(1, min(their_steps, steps) + 1):
        first_kinds = dict[str, int]()
        for rank in range(ranks + 1):
            where_in_run = f"step {step}" + (f" of rank {rank}" if ranks else "")
            sources, pair = f"In {where_in_run}, {first} and {second} have", (theirs[step, rank], mine[step, rank])
            judged, where = _judge_step(sources, *pair, names or {}, settled[rank])
            findings += judged
            if wrong := [list(KINDS).index(finding.kind) for finding in judged if not finding.good]:
                first_kinds[where_in_run] = min(wrong)
        if first_kinds:  # (a wrong input of one rank makes the gradients of all wrong)
            when = min(first_kinds, key=lambda each: first_kinds[each])
            break
    compared = str(step) if steps == their_steps else f"{step} of {max(steps, their_steps)}"
    return Comparison(
        labels=(first, second),
        facts=(theirs[1, 0].facts.settings, mine[1, 0].facts.settings),
        about={"model": mine[1, 0].facts.model, "ranks": str(ranks + 1), "steps": compared},
        when=when,
        findings=[f for f in findings if f.kind not in MODULES or f.name == "output/"],
        watched=[f for f in findings if f.kind in MODULES and f.name != "output/"],
        bounds=KINDS,
        their_names=where,
    )


def _judge_step(
    sources: str, there: Recorded, here: Recorded, names: Names, settled: dict[str, Any]
) -> tuple[list[Finding], dict[str, str]]:
    """Judge a step; ``settled``: for each parameter, a mask of the entries whose sign has been certain so far."""
    _check_same_number(sources, "micro-batches", there.facts.micro_batches, here.facts.micro_batches)
    theirs, noise, modules = dict(there.arrays), dict(there.noise), dict[str, str]()
    if names:
        pairing = Pairing(here.arrays, theirs, parameters_paired(here.facts.shapes, there.facts.shapes, names), names)
        theirs, modules = pairing.named(theirs), {n: t for n, t in pairing.modules.items() if n != t}
        noise = {}
    unit = max(there.facts.unit, here.facts.unit)
    _check_same_start(sources, theirs, here.arrays, 2 * ROUNDINGS * unit, not settled)
    noise = {name: max(noise.get(name, 0.0), here.noise.get(name, 0.0)) for name in {*noise, *here.noise}}
    actual, reference = dict(here.arrays), dict(theirs)
    for name in [name for name in reference if name not in actual and name.startswith(_OPTIONAL)]:
        del reference[name]
    for name, moved in here.below("moved/").items():
        noise |= _weight_noise(name, moved, actual, reference, unit, settled)
    tolerances = Tolerances(rounding=2 * ROUNDINGS * unit)
    return judge_steps(actual, reference, KINDS, tolerances, noise), modules


def _weight_noise(
    name: str, moved: np.ndarray, actual: dict, reference: dict, unit: float, settled: dict
) -> dict[str, float]:
    """Drop the entries whose sign rounding may flip, and return how far a weight and its average may differ."""
    gradient, noise = reference.get(f"gradient/{name}"), {}
    if gradient is None or gradient.shape != moved.shape:
        return {}
    mask = settled[name] = signs_are_certain(gradient, moved) & settled.get(name, True)
    relative = (moved / np.maximum(np.abs(gradient.astype(np.float64)), 1e-300))[mask]
    for kind in ("step", "average"):
        key = f"{kind}/{name}"
        if key in reference:
            change, start = reference[key][mask], reference.get(f"start/{key}", np.zeros(0))[mask]
            reference[key], actual[key] = change, actual[key][mask] if key in actual else np.zeros(0)
            rounded = np.linalg.norm(change * relative) + unit * np.linalg.norm(start)
            noise[key] = float(rounded / (np.linalg.norm(change) or 1.0))
    return noise


def _check_same_start(
    sources: str, theirs: Mapping[str, Any], mine: Mapping[str, Any], most: float, is_first: bool
) -> None:
    """Raise DataError unless both steps have an input that is the same, and the first steps the same weights."""
    for name in (name for name in theirs if is_first and name.startswith("start/step/")):
        if name not in mine or relative_error(mine[name], theirs[name]) > most:
            raise DataError(
                f"{sources} different weights, such as {name.removeprefix('start/step/')}. Record both again from the "
                "same checkpoint."
            )
    inputs = [name for name in theirs if name.startswith("input//")]
    if any(name not in mine or mine[name].shape != theirs[name].shape for name in inputs):
        raise DataError(f"{sources} inputs of different shapes. Record both again with the same batch.")
    informative = [name for name in inputs if len(np.unique(theirs[name])) > 2]  # (a mask may be the same by chance)
    if informative and all(relative_error(mine[name], theirs[name]) > most for name in informative):
        raise DataError(
            f"{sources} no input in common. Record both again with the same samples, and with noise and times drawn on "
            "the CPU from one seed."
        )


def _check_same_number(sources: str, what: str, there: int, here: int) -> None:
    if there != here:
        raise DataError(f"{sources} {there} and {here} {what}. Record both again with the same number of {what}.")
