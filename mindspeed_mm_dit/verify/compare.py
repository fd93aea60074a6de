"""Two sides' numbers against each other: where they part, and whether that passes. NumPy only.

An error is the norm of the difference over the norm of the reference, which is the first side.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mindspeed_mm_dit.verify.table import relative_error

TOLERANCE = 1e-5
REASONS = {
    "forward": "A float32 sum of a thousand terms, added in another order, differs by about 1e-6 of its size, and so "
    "do two implementations of exp, tanh or a normalisation; the embedded default was measured at 4e-7. 1e-5 leaves "
    "room for tens of layers of that, and is far below what a wrong formula, axis or constant does.",
    "gradients": "A gradient passes through every layer twice, and is held to the same bound parameter by parameter: "
    "what a wrong backward rule changes is one parameter, not the norm over all. The embedded default was measured "
    "at 5e-7.",
    "training": "AdamW divides by the root of the mean square, so an entry whose gradient is rounding noise may step "
    "the other way. Over 20 steps of the embedded default that was measured to move the loss by 8e-7 of itself, while "
    "MindSpore's ops.Adam, whose rule differs a little, is 1.1e-5 off after five. Of the error, up to 1e-6 is the "
    "rounding of the log, which prints seven digits.",
}
"""Why each check has its tolerance."""


@dataclass(frozen=True)
class LayerFinding:
    """One part of the model, in the order in which the parts finish."""

    name: str
    input_error: float
    """Largest error of what went in."""
    error: float
    """Error of what came out."""


@dataclass(frozen=True)
class Finding:
    """The error of one quantity."""

    name: str
    error: float
    norm: float
    """Norm of the reference."""


@dataclass(frozen=True)
class Check:
    """One line of the verdict."""

    name: str
    """A key of REASONS."""
    error: float
    """The largest."""
    where: str
    """The quantity that has it; past tolerance: the one to look at."""
    tolerance: float

    @property
    def good(self) -> bool:
        """Whether the error is within tolerance."""
        return self.error <= self.tolerance


@dataclass(frozen=True)
class Measured:
    """What a worker wrote."""

    arrays: Mapping[str, np.ndarray]
    order: tuple[str, ...]
    """Watched parts in the order in which they finished."""
    facts: dict[str, str]
    """Versions and device."""

    @classmethod
    def read(cls, path: Path) -> Measured:
        """Open the worker's .npz; arrays are read when they are asked for."""
        arrays: Mapping[str, np.ndarray] = np.load(path, allow_pickle=False)
        return cls(arrays, tuple(arrays["order"].tolist()), json.loads(str(arrays["facts"])))


def compare_layers(reference: Measured, other: Measured) -> list[LayerFinding]:
    """Return the errors of every watched part, in order."""

    def error(key: str) -> float:
        return relative_error(other.arrays[key], reference.arrays[key]) if key in other.arrays else math.inf

    inputs: dict[str, list[str]] = {name: [] for name in reference.order}
    for key in reference.arrays:
        kind, _, rest = key.partition("/")
        if kind == "in":
            inputs[rest.rpartition("/")[0]].append(key)
    return [
        LayerFinding(name, max((error(key) for key in inputs[name]), default=0.0), error(f"out/{name}"))
        for name in reference.order
    ]


def first_past(layers: list[LayerFinding], tolerance: float) -> LayerFinding | None:
    """Return the part where the sides part: the first that gets agreeing inputs and gives another output.

    Parts finish before the part that holds them, so it is the smallest one. Where every wrong output has wrong
    inputs, it is the first wrong one.
    """
    wrong = [layer for layer in layers if not layer.error <= tolerance]
    culprits = [layer for layer in wrong if layer.input_error <= tolerance]
    return next(iter(culprits or wrong), None)


def compare_gradients(reference: Measured, other: Measured) -> list[Finding]:
    """Return the error of each parameter's gradient."""
    names = [key for key in reference.arrays if key.startswith("gradient/")]
    return [_finding(key.partition("/")[2], other.arrays.get(key), reference.arrays[key]) for key in names]


def compare_losses(reference: Mapping[int, float], other: Mapping[int, float]) -> list[Finding]:
    """Return the relative difference of the loss of each training step."""
    return [
        Finding(f"step {step}", relative_error(np.array([other.get(step, math.nan)]), np.array([loss])), abs(loss))
        for step, loss in reference.items()
    ]


def check_layers(layers: list[LayerFinding], tolerance: float = TOLERANCE) -> Check:
    """Judge the forward pass; past tolerance, name the layer to look at."""
    culprit = first_past(layers, tolerance)
    shown = culprit or max(layers, key=lambda layer: layer.error)
    return Check("forward", shown.error, shown.name, tolerance)


def check_findings(name: str, findings: list[Finding], tolerance: float = TOLERANCE) -> Check:
    """Judge by the worst of ``findings``."""
    worst = max(findings, key=lambda finding: finding.error)
    return Check(name, worst.error, worst.name, tolerance)


def _finding(name: str, ours: np.ndarray | None, reference: np.ndarray) -> Finding:
    error = math.inf if ours is None else relative_error(ours, reference)
    return Finding(name, error, float(np.linalg.norm(reference.astype(np.float64).ravel())))
