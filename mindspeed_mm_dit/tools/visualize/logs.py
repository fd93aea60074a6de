"""Loss curves from logs of this project, MindSpeed-MM and facebookresearch/DiT, as text or in TensorBoard."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mindspeed_mm_dit.configs.files import is_folder
from mindspeed_mm_dit.errors import DataError
from mindspeed_mm_dit.training import read_logs
from mindspeed_mm_dit.training.read_logs import (
    NUMBER,
    TRAINING_SCALARS,
    first,
    read_folder,
    read_scalars,
    read_text,
    step_of,
)
from mindspeed_mm_dit.training.validation import QUARTERS, name_of, scalar_of

_PUBLISHED_DIT = re.compile(rf"\(step=(\d+)\) *train loss: *{NUMBER}", re.I)
_VALIDATION = re.compile(r"\bvalidation loss at iteration +(\d+)(?: on validation set)? *\|", re.I)
_VALIDATION_VALUE = re.compile(rf"\| *(?:lm )?(loss|noise [\d-]+%) value: *{NUMBER}", re.I)

HELD_OUT = "held-out images"
VALIDATION_SCALARS = {
    HELD_OUT: ("valid/loss", "lm loss validation", "loss validation"),
    **{name_of(quarter): (scalar_of(quarter), f"{name_of(quarter)} validation") for quarter in QUARTERS},
}
"""Curves of a validation, and their names in TensorBoard: ours, and what Megatron makes of ours."""

KNOWN_FORMATS = (
    "this project's and MindSpeed-MM's ('iteration 20/ 800 | ... | loss: 1.0E+00 |')",
    "facebookresearch/DiT's ('(step=0000100) Train Loss: 0.2000')",
    "a TensorBoard folder with the scalar 'train/loss'",
)


@dataclass(frozen=True)
class Curve:
    """Losses by step."""

    label: str
    """Their name in a picture."""
    steps: np.ndarray
    """(N,) int64, ascending."""
    losses: np.ndarray
    """(N,) float64."""


def read_curve(path: str | Path) -> Curve:
    """Read the losses of a run from its log file or TensorBoard folder; if a step was logged twice, the later value.

    Raises:
        DataError: the log cannot be read, holds no loss in a known format, or holds a step that no run can have.
    """
    path = _tensorboard_folder(path)
    losses = first(read_folder(path), TRAINING_SCALARS) if is_folder(path) else read_text(path, parse_losses)
    if not losses:
        raise DataError(str(path), "contains no losses", "known formats are: " + "; ".join(KNOWN_FORMATS))
    return _curve(str(path), losses)


def read_validation(path: str | Path) -> list[Curve]:
    """Read the validation losses of a run, from the same sources as ``read_curve``: the mean, then each quarter.

    Logs from before the quarters have only the mean; if nothing was validated, the list is empty.
    """
    path = _tensorboard_folder(path)
    if is_folder(path):
        scalars = read_folder(path)
        curves = {name: first(scalars, tags) for name, tags in VALIDATION_SCALARS.items()}
    else:
        curves = read_text(path, parse_validation)
    return [_curve(name, losses) for name, losses in curves.items() if losses]


def _tensorboard_folder(path: str | Path) -> Path:
    """Return the TensorBoard folder of a run if ``path`` is the run's folder, otherwise ``path``."""
    below = Path(path) / "tensorboard"
    return below if is_folder(below) else Path(path)


def _curve(label: str, losses: dict[int, float]) -> Curve:
    steps = sorted(losses)
    return Curve(label, np.array(steps, np.int64), np.array([losses[step] for step in steps]))


def parse_losses(lines: Iterable[str]) -> dict[int, float]:
    """Return step -> loss from the lines of a log in any known format; empty if the format is unknown.

    Raises ValueError for a step that no run can have.
    """
    lines = list(lines)
    published = {step_of(m[1]): float(m[2]) for m in map(_PUBLISHED_DIT.search, lines) if m}
    return read_logs.parse_losses(lines) or published


def parse_validation(lines: Iterable[str]) -> dict[str, dict[int, float]]:
    """Return step -> loss on held-out images, by name, from this project's lines and Megatron's.

    Raises ValueError as ``parse_losses`` does.
    """
    curves: dict[str, dict[int, float]] = {name: {} for name in VALIDATION_SCALARS}
    for line in lines:
        if match := _VALIDATION.search(line):
            for name, value in _VALIDATION_VALUE.findall(line):
                label = HELD_OUT if name == "loss" else name
                if label in curves:
                    curves[label][step_of(match[1])] = float(value)
    return curves


def read_scalar(folder: str | Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (steps, values) of a scalar in a TensorBoard folder; if a step was written twice, the later value."""
    by_step = read_scalars(folder).get(name, {})
    return np.array(list(by_step), int), np.array(list(by_step.values()), float)
