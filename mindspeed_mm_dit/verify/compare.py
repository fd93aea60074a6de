"""What two processes wrote of one model, against each other: where they part, and whether that passes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mindspeed_mm_dit.verify.table import Computed, Finding, judge_steps, relative_error, worst


@dataclass(frozen=True)
class Measured:
    """What a process wrote (``worker.py``)."""

    arrays: Computed
    """Outputs and gradients by name, and ``in/PART/<number>``: what a part was given."""
    facts: dict[str, str]
    """Versions and device."""

    @classmethod
    def read(cls, path: Path) -> Measured:
        """Open the .npz; arrays are read when they are asked for."""
        arrays: Mapping[str, np.ndarray] = np.load(path, allow_pickle=False)
        return cls(arrays, json.loads(str(arrays["facts"])))


def compare(reference: Measured, other: Measured) -> dict[str, list[Finding]]:
    """Judge every quantity that the reference holds: findings by kind."""
    inputs: dict[str, float] = {}
    for name in (name for name in reference.arrays if name.startswith("in/")):
        part = name[3:].rpartition("/")[0]
        ours = other.arrays[name] if name in other.arrays else np.zeros(0)
        inputs[part] = max(inputs.get(part, 0.0), relative_error(ours, reference.arrays[name]))
    findings: dict[str, list[Finding]] = {"output": [], "gradient": []}
    for found in judge_steps(other.arrays, reference.arrays):
        findings[found.kind].append(replace(found, input_error=inputs.get(found.which, 0.0)))
    return findings


def compare_losses(reference: Mapping[int, float], other: Mapping[int, float]) -> list[Finding]:
    """Judge the loss of each training step."""
    ours, theirs = ({f"loss/{n}": np.array([loss]) for n, loss in side.items()} for side in (other, reference))
    return judge_steps(ours, theirs)


def first_past(parts: Sequence[Finding]) -> Finding | None:
    """Return the part where the sides part: the first that gets agreeing inputs and gives another output.

    Parts finish before the part that holds them, so it is the smallest one. Where every wrong output has wrong
    inputs, it is the first wrong one.
    """
    wrong = [part for part in parts if not part.good]
    culprits = [part for part in wrong if part.input_error <= part.tolerance]
    return next(iter(culprits or wrong), None)


def verdict(findings: Mapping[str, Sequence[Finding]]) -> dict[str, Finding]:
    """Return of each kind the finding to look at: the part where the sides part, else the worst."""
    return {kind: (first_past(found) if kind == "output" else None) or worst(found)
            for kind, found in findings.items() if found}  # fmt: skip
