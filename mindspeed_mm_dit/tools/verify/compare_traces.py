"""Compare what two machines recorded of their first steps (``record_trace.py``): where do they part?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

from mindspeed_mm_dit.errors import DataError
from mindspeed_mm_dit.tools.verify.compare import JUDGED, Comparison
from mindspeed_mm_dit.tools.verify.pairs import Names, Pairing, parameters_paired
from mindspeed_mm_dit.tools.verify.prove import ROUNDINGS, decided
from mindspeed_mm_dit.tools.verify.table import MODULES, Bound, Finding, Tolerances, judge_steps, relative_error
from mindspeed_mm_dit.tools.verify.witness_file import Recorded, read

MEASURED = Bound(
    "Measured on both machines: each repeated its own step with the weights, what every module gives, and every "
    f"gradient moved at random by up to {ROUNDINGS} roundings. Twice the larger of the two distances is the bound; at "
    f"least twice {ROUNDINGS} roundings. A weight's change may differ as its gradient may, and by its own rounding."
)
_MAY_LACK = ("loss/", "average/", *(f"{kind}/" for kind in MODULES))
"""What only one machine may have seen: no loss or average was given, or the modules are compiled."""
KINDS = dict.fromkeys((*MODULES, *JUDGED), MEASURED)


def compare_witnesses(first: str, second: str, names: Names | None = None) -> Comparison:
    """Compare two witnesses; the first is the reference.

    names: parameter or module in the second -> its name in the first, if they differ.

    Raises:
        UserError: a folder that is no whole witness; or steps of other weights, inputs, ranks or micro-batches.
    """
    theirs, mine = read(first), read(second)
    (their_steps, their_ranks), (steps, ranks) = max(theirs), max(mine)
    _check_as_many(f"{first} and {second}", "ranks", their_ranks + 1, ranks + 1)
    findings, where, when = list[Finding](), dict[str, str](), ""
    settled: dict[int, dict[str, Any]] = defaultdict(dict)
    for step in range(1, min(their_steps, steps) + 1):
        begins = dict[str, int]()
        for rank in range(ranks + 1):
            place = f"step {step}" + (f" of rank {rank}" if ranks else "")
            found, where = _judged(
                f"{first} and {second}, {place}", theirs[step, rank], mine[step, rank], names or {}, settled[rank]
            )
            findings += found
            if wrong := [list(KINDS).index(finding.kind) for finding in found if not finding.good]:
                begins[place] = min(wrong)
        if begins:  # (a wrong input of one rank makes the gradients of all wrong)
            when = min(begins, key=lambda place: begins[place])
            break
    compared = str(step) if steps == their_steps else f"{step} of {max(steps, their_steps)}"
    return Comparison(
        labels=(first, second), facts=(theirs[1, 0].facts.settings, mine[1, 0].facts.settings),
        about={"model": mine[1, 0].facts.model, "ranks": str(ranks + 1), "steps": compared}, when=when,
        findings=[f for f in findings if f.kind not in MODULES or f.name == "output/"],
        watched=[f for f in findings if f.kind in MODULES and f.name != "output/"], bounds=KINDS, their_names=where,
    )  # fmt: skip


def _judged(
    said: str, there: Recorded, here: Recorded, names: Names, settled: dict[str, Any]
) -> tuple[list[Finding], dict[str, str]]:
    """Judge a step; ``settled``: for each parameter, a mask of the entries whose sign no step before has left open."""
    _check_as_many(said, "micro-batches", there.facts.micro_batches, here.facts.micro_batches)
    theirs, noise, modules = dict(there.arrays), dict(there.noise), dict[str, str]()
    if names:
        pairing = Pairing(here.arrays, theirs, parameters_paired(here.facts.shapes, there.facts.shapes, names), names)
        theirs, modules = pairing.named(theirs), {n: t for n, t in pairing.modules.items() if n != t}
        noise = {}
    unit = max(there.facts.unit, here.facts.unit)
    _check_begin(said, theirs, here.arrays, 2 * ROUNDINGS * unit, not settled)
    noise = {name: max(noise.get(name, 0.0), here.noise.get(name, 0.0)) for name in {*noise, *here.noise}}
    own, reference = dict(here.arrays), dict(theirs)
    for name in [name for name in reference if name not in own and name.startswith(_MAY_LACK)]:
        del reference[name]
    for name, moved in here.below("moved/").items():
        noise |= _of_steps(name, moved, own, reference, unit, settled)
    asked = Tolerances(rounding=2 * ROUNDINGS * unit)
    return judge_steps(own, reference, KINDS, asked, noise), modules


def _of_steps(name: str, moved: np.ndarray, own: dict, reference: dict, unit: float, settled: dict) -> dict[str, float]:
    """Leave entries out whose sign rounding may turn, and return how far a weight and its average may differ."""
    gradient, noise = reference.get(f"gradient/{name}"), {}
    if gradient is None or gradient.shape != moved.shape:
        return {}
    mask = settled[name] = decided(gradient, moved) & settled.get(name, True)
    share = (moved / np.maximum(np.abs(gradient.astype(np.float64)), 1e-300))[mask]
    for kind in ("step", "average"):
        key = f"{kind}/{name}"
        if key in reference:
            change, start = reference[key][mask], reference.get(f"start/{key}", np.zeros(0))[mask]
            reference[key], own[key] = change, own[key][mask] if key in own else np.zeros(0)
            rounded = np.linalg.norm(change * share) + unit * np.linalg.norm(start)
            noise[key] = float(rounded / (np.linalg.norm(change) or 1.0))
    return noise


def _check_begin(said: str, theirs: Mapping[str, Any], mine: Mapping[str, Any], most: float, is_first: bool) -> None:
    """Raise DataError unless both steps have an input that is the same, and the first steps the same weights."""
    for name in (name for name in theirs if is_first and name.startswith("start/step/")):
        if name not in mine or relative_error(mine[name], theirs[name]) > most:
            parameter = name.removeprefix("start/step/")
            raise _other(said, f"other weights: {parameter}", "from the same checkpoint")
    inputs = [name for name in theirs if name.startswith("input//")]
    if any(name not in mine or mine[name].shape != theirs[name].shape for name in inputs):
        raise _other(said, "inputs of other shapes", "with the same batch")
    telling = [name for name in inputs if len(np.unique(theirs[name])) > 2]  # (a mask may be the same by chance)
    if telling and all(relative_error(mine[name], theirs[name]) > most for name in telling):
        raise _other(said, "other inputs, not one is the same",
                     "with the same samples, and with noise and times drawn on the CPU from one seed")  # fmt: skip


def _check_as_many(said: str, what: str, there: int, here: int) -> None:
    if there != here:
        raise _other(said, f"{there} and {here} {what}", f"with as many {what}")


def _other(said: str, what: str, how: str) -> DataError:
    return DataError(said, f"are steps of {what}", f"record both again, {how}")
