"""What two processes wrote of one model, against each other: where they part, and whether that passes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mindspeed_mm_dit.verify.table import (
    FORWARD,
    GRADIENTS,
    TRAINING,
    Finding,
    Quantity,
    Rows,
    Tolerances,
    find,
    judge,
    relative_error,
    worst,
)

ASKED = Tolerances()
CHECKS = {"forward": FORWARD, "gradients": GRADIENTS, "training": TRAINING}
"""The lines of a verdict, and what passes in each."""
COMPARED: Rows = (
    Quantity(
        "out/(.+)", lambda step, part: step.outputs[part], FORWARD,
        all_names=lambda step: (f"out/{part}" for part in step.outputs),
    ),
    Quantity(
        "gradient/(.+)", lambda step, name: step.gradients[name], GRADIENTS,
        all_names=lambda step: (f"gradient/{name}" for name in step.gradients),
    ),
)  # fmt: skip
"""Outputs of the parts of a network in the order in which they finish, and the gradient of every parameter."""


@dataclass(frozen=True)
class Measured:
    """What a process wrote (``worker.py``)."""

    arrays: Mapping[str, np.ndarray]
    """Quantities of COMPARED by name, and ``in/PART/<number>``: what a part was given."""
    facts: dict[str, str]
    """Versions and device."""

    @classmethod
    def read(cls, path: Path) -> Measured:
        """Open the .npz; arrays are read when they are asked for."""
        arrays: Mapping[str, np.ndarray] = np.load(path, allow_pickle=False)
        return cls(arrays, json.loads(str(arrays["facts"])))

    def error_of(self, name: str, reference: Measured) -> float:
        """Return the error of one array; infinite where it is not there."""
        return relative_error(self.arrays[name], reference.arrays[name]) if name in self.arrays else math.inf


def compare(reference: Measured, other: Measured) -> dict[str, list[Finding]]:
    """Judge every quantity that the reference holds: findings by the line of the verdict."""
    findings: dict[str, list[Finding]] = {"forward": [], "gradients": []}
    inputs: dict[str, float] = {}
    for name in reference.arrays:
        kind, _, rest = name.partition("/")
        if kind == "in":
            part = rest.rpartition("/")[0]
            inputs[part] = max(inputs.get(part, 0.0), other.error_of(name, reference))
        elif found := find(COMPARED, name):
            ours = other.arrays.get(name, np.zeros(0))
            judged = judge(rest, ours, reference.arrays[name], found[0].bound, ASKED)
            findings["forward" if kind == "out" else "gradients"].append(judged)
    findings["forward"] = [replace(each, input_error=inputs.get(each.name, 0.0)) for each in findings["forward"]]
    return findings


def compare_losses(reference: Mapping[int, float], other: Mapping[int, float]) -> list[Finding]:
    """Judge the loss of each training step."""
    return [
        judge(f"step {step}", np.array([other.get(step, math.nan)]), np.array([loss]), TRAINING, ASKED)
        for step, loss in reference.items()
    ]


def first_past(parts: Sequence[Finding]) -> Finding | None:
    """Return the part where the sides part: the first that gets agreeing inputs and gives another output.

    Parts finish before the part that holds them, so it is the smallest one. Where every wrong output has wrong
    inputs, it is the first wrong one.
    """
    wrong = [part for part in parts if not part.good]
    culprits = [part for part in wrong if part.input_error <= part.tolerance]
    return next(iter(culprits or wrong), None)


def verdict(findings: Mapping[str, Sequence[Finding]]) -> dict[str, Finding]:
    """Return of each line the finding to look at: the part where the sides part, else the worst."""
    return {line: (first_past(found) if line == "forward" else None) or worst(found)
            for line, found in findings.items() if found}  # fmt: skip
