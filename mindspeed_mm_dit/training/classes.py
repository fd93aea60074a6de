"""The classes of a run: said at its start, kept in its checkpoints, compared when it is resumed."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit.data.folder import ImageIndex
from mindspeed_mm_dit.errors import CheckpointError

CLASSES_SHOWN = 10


def say_classes(train: ImageIndex, valid: ImageIndex, num_classes: int) -> None:
    """Print what a run learns from, and warn where classes of the model have no images."""
    labels, counts = np.unique(np.concatenate([train.labels, valid.labels]), return_counts=True)
    shown = [f"{_named(label, train.classes)} ({count})" for label, count in zip(labels.tolist(), counts.tolist())]
    if len(shown) > CLASSES_SHOWN:
        shown = [*shown[: CLASSES_SHOWN - 2], "...", shown[-1]]
    held_out = f", {len(valid)} held out" if len(valid) else ""
    line = f"{_count(len(labels), 'class', 'classes')}, {_count(len(train), 'image', 'images')} to train on{held_out}: "
    _print(line + ", ".join(shown))
    if len(labels) < num_classes:
        without = num_classes - len(labels)
        print(
            f"warning: predictor.num_classes = {num_classes}, and {_count(without, 'class has', 'classes have')} no "
            "images: nothing is learned of them",
            file=sys.stderr,
        )


def check_classes(facts: Mapping[str, Any], classes: Sequence[str], path: Path) -> None:
    """Raise CheckpointError if a label of the checkpoint ``path`` had another name than it has in ``classes``.

    ``facts``: its run.json; one without names is accepted, and so are classes that came or went at the end.
    """
    before = facts.get("classes") or ()
    renamed = [label for label, (was, name) in enumerate(zip(before, classes)) if was != name]
    if renamed:
        label = renamed[0]
        raise CheckpointError(
            f"--load: {path}",
            f"label {label} was {before[label]!r} there and is {classes[label]!r} now "
            f"(classes there: {_short(before)}; now: {_short(classes)})",
            "name the folders or labels as they were, or leave --load out to start anew with another --save",
        )


def _named(label: int, classes: Sequence[str]) -> str:
    name = classes[label]
    return name if name == str(label) else f"{label} {name}"


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _short(names: Sequence[str]) -> str:
    return ", ".join(names[:CLASSES_SHOWN]) + (", ..." if len(names) > CLASSES_SHOWN else "")


def _print(text: str) -> None:
    """Print ``text``; letters that the terminal cannot show are spelled out."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
