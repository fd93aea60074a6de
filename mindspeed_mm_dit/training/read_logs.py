"""Read losses and gradient norms of a run: from its log, which is that of MindSpeed-MM too, or from TensorBoard."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from mindspeed_mm_dit.configs.files import UnusableFile, check_file, is_folder, lines_of
from mindspeed_mm_dit.configs.limits import LARGEST, short_repr
from mindspeed_mm_dit.errors import DataError

Parsed = TypeVar("Parsed")

NUMBER = r"([-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|nan|inf))"
_LOSS = re.compile(rf"\biteration +(\d+)/ *\d+ \|.*?\| *(?:lm )?loss: *{NUMBER}", re.I)
_GRAD_NORM = re.compile(rf"\biteration +(\d+)/.*?\| *grad norm: *{NUMBER}", re.I)

TRAINING_SCALARS = ("train/loss", "lm loss", "loss")
"""Names of the loss in TensorBoard: ours, Megatron's, a common one."""
GRAD_NORM_SCALARS = ("train/grad_norm", "grad-norm")


def read_steps(path: str | Path) -> dict[int, tuple[float, float]]:
    """Read loss and gradient norm by step from a log or TensorBoard folder of this project or MindSpeed-MM.

    Raises:
        DataError: the log cannot be read, or holds none.
    """
    path = Path(path)
    if is_folder(path):
        scalars = read_folder(path)
        losses, norms = first(scalars, TRAINING_SCALARS), first(scalars, GRAD_NORM_SCALARS)
    else:
        losses, norms = read_text(path, parse_losses), read_text(path, _norms)
    if not losses.keys() & norms.keys():
        raise DataError(str(path), "no losses with gradient norms found in it", "name a log of --log-interval")
    return {step: (losses[step], norms[step]) for step in sorted(losses.keys() & norms.keys())}


def parse_losses(lines: Iterable[str]) -> dict[int, float]:
    """Return step -> loss from the lines of a log; raises ValueError for a step that no run can have."""
    return _by_step(_LOSS, lines)


def _norms(lines: Iterable[str]) -> dict[int, float]:
    return _by_step(_GRAD_NORM, lines)


def _by_step(pattern: re.Pattern[str], lines: Iterable[str]) -> dict[int, float]:
    return {step_of(m[1]): float(m[2]) for m in map(pattern.search, lines) if m}


def read_text(path: Path, parse: Callable[[Iterable[str]], Parsed]) -> Parsed:
    """Return the result of ``parse`` on the lines of a text file; raises DataError if they cannot be read."""
    _check_regular(path)
    try:
        return parse(lines_of(path.read_text(encoding="utf-8", errors="replace")))
    except OSError as error:
        raise DataError(str(path), f"cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise DataError(str(path), f"{error}", "correct the line, or leave it out") from None


def _check_regular(path: Path) -> None:
    """Raise DataError for a pipe or a device, which would be read forever; the reader reports a missing file."""
    try:
        if os.path.lexists(path):
            check_file(path)
    except UnusableFile as error:
        raise DataError(str(path), str(error), "name a log file or a TensorBoard folder") from None


def step_of(text: str) -> int:
    """Return a step; raises ValueError unless it is a whole number up to 2**63 - 1."""
    if not text.isdecimal() or len(text) > 30 or int(text) > LARGEST:
        raise ValueError(f"holds a step that no run reaches: {short_repr(text)}")
    return int(text)


def read_folder(path: Path) -> dict[str, dict[int, float]]:
    """Return name -> step -> value of all scalars in a TensorBoard folder; raises DataError for a pipe or device."""
    for file in path.glob("*tfevents*"):
        _check_regular(file)
    return read_scalars(path)


def first(scalars: Mapping[str, dict[int, float]], names: Iterable[str]) -> dict[int, float]:
    """Return step -> value of the first of ``names`` that exists."""
    return next((scalars[name] for name in names if scalars.get(name)), {})


def read_scalars(folder: str | Path) -> dict[str, dict[int, float]]:
    """Return name -> step -> value of all scalars in a TensorBoard folder, steps ascending."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    by_name = {name: {event.step: event.value for event in events.Scalars(name)} for name in events.Tags()["scalars"]}
    return {name: dict(sorted(by_step.items())) for name, by_step in by_name.items()}
