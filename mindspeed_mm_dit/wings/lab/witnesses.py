"""Compare what two machines recorded of one step (``witness.py``): where do they part?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mindspeed_mm_dit.errors import DataError
from mindspeed_mm_dit.wings.lab.compare import JUDGED, Comparison
from mindspeed_mm_dit.wings.lab.pairs import Names, Pairing, parameters_paired
from mindspeed_mm_dit.wings.lab.prove import ROUNDINGS, decided
from mindspeed_mm_dit.wings.lab.table import MODULES, Bound, Finding, Tolerances, judge_steps, relative_error
from mindspeed_mm_dit.wings.lab.witness_file import Recorded, read

MEASURED = Bound(
    "Measured on both machines: each repeated its own step with the weights, what every module gives, and every "
    f"gradient moved at random by up to {ROUNDINGS} roundings. Twice the larger of the two distances is the bound; at "
    f"least twice {ROUNDINGS} roundings. A weight's change may differ as its gradient may, and by its own rounding."
)
_MAY_LACK = ("average/", *(f"{kind}/" for kind in MODULES))
"""What only one machine may have seen: no average was given, or the modules are compiled."""
KINDS = dict.fromkeys((*MODULES, *JUDGED), MEASURED)


def compare_witnesses(first: str, second: str, names: Names | None = None) -> Comparison:
    """Compare two witnesses; the first is the reference.

    names: parameter or module in the second -> its name in the first, if they differ.

    Raises:
        UserError: a folder that is no whole witness; or steps of other weights, inputs, ranks or micro-batches.
    """
    theirs, mine = read(first), read(second)
    for what, (there, here) in {
        "ranks": (len(theirs), len(mine)),
        "micro-batches": (theirs[0].facts["micro_batches"], mine[0].facts["micro_batches"]),
    }.items():
        if there != here:
            raise _other(first, second, f"{there} and {here} {what}", f"with as many {what}")
    findings, where = [], dict[str, str]()
    for there, here in zip(theirs, mine):
        found, where = _judged(there, here, names or {})
        findings += found
        if not all(finding.good for finding in found):
            break  # (of the first rank that is wrong)
    return Comparison(
        labels=(first, second), facts=(theirs[0].facts["settings"], mine[0].facts["settings"]),
        about={"model": mine[0].facts["model"], "ranks": str(len(mine))},
        findings=[f for f in findings if f.kind not in MODULES or f.name == "output/"],
        watched=[f for f in findings if f.kind in MODULES and f.name != "output/"], bounds=KINDS, their_names=where,
    )  # fmt: skip


def _judged(there: Recorded, here: Recorded, names: Names) -> tuple[list[Finding], dict[str, str]]:
    theirs, noise, modules = dict(there.arrays), dict(there.noise), dict[str, str]()
    if names:
        pairing = Pairing(here.arrays, theirs, parameters_paired(here.shapes, there.shapes, names), names)
        theirs, modules = pairing.named(theirs), {n: t for n, t in pairing.modules.items() if n != t}
        noise = {}
    unit = max(there.facts["unit"], here.facts["unit"])
    _check_begin(there.label, here.label, theirs, here.arrays, 2 * ROUNDINGS * unit)
    noise = {name: max(noise.get(name, 0.0), here.noise.get(name, 0.0)) for name in {*noise, *here.noise}}
    own, reference = dict(here.arrays), dict(theirs)
    for name in [name for name in reference if name not in own and name.startswith(_MAY_LACK)]:
        del reference[name]
    for name, moved in here.below("moved/").items():
        noise |= _of_steps(name, moved, own, reference, unit)
    asked = Tolerances(rounding=2 * ROUNDINGS * unit)
    return judge_steps(own, reference, KINDS, asked, noise), modules


def _of_steps(name: str, moved: np.ndarray, own: dict, reference: dict, unit: float) -> dict[str, float]:
    """Leave entries out whose sign rounding may turn, and return how far a weight and its average may differ."""
    gradient, noise = reference.get(f"gradient/{name}"), {}
    if gradient is None or gradient.shape != moved.shape:
        return {}
    mask = decided(gradient, moved)
    share = (moved / np.maximum(np.abs(gradient), 1e-300))[mask]
    for kind in ("step", "average"):
        key = f"{kind}/{name}"
        if key in reference:
            change, start = reference[key][mask], reference.get(f"start/{key}", np.zeros(0))[mask]
            reference[key], own[key] = change, own[key][mask] if key in own else np.zeros(0)
            rounded = np.linalg.norm(change * share) + unit * np.linalg.norm(start)
            noise[key] = float(rounded / (np.linalg.norm(change) or 1.0))
    return noise


def _check_begin(first: str, second: str, theirs: Mapping[str, Any], mine: Mapping[str, Any], most: float) -> None:
    """Raise DataError unless both steps began with the same weights, and with an input that is the same."""
    for name in (name for name in theirs if name.startswith("start/step/")):
        if name not in mine or relative_error(mine[name], theirs[name]) > most:
            parameter = name.removeprefix("start/step/")
            raise _other(first, second, f"other weights: {parameter}", "from the same checkpoint")
    inputs = [name for name in theirs if name.startswith("input//")]
    if any(name not in mine or mine[name].shape != theirs[name].shape for name in inputs):
        raise _other(first, second, "inputs of other shapes", "with the same batch")
    telling = [name for name in inputs if len(np.unique(theirs[name])) > 2]  # (a mask may be the same by chance)
    if telling and all(relative_error(mine[name], theirs[name]) > most for name in telling):
        raise _other(first, second, "other inputs, not one is the same",
                     "with the same samples, and with noise and times drawn on the CPU from one seed")  # fmt: skip


def _other(first: str, second: str, what: str, how: str) -> DataError:
    return DataError(f"{first} and {second}", f"are steps of {what}", f"record both again, {how}")
