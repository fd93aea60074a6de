"""Print the data of a run when it starts; compare the names of its classes when it resumes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit.data.duplicates import find_copies
from mindspeed_mm_dit.data.folder import DECODE_CHECK_LIMIT
from mindspeed_mm_dit.data.rows import PROBLEMS_SHOWN, Rows
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.terminal import echo_if_open

CLASSES_SHOWN = 10
COPIES_SHOWN = 3


def log_notes(rows: Rows, noun: str = "image", skips: bool = True) -> None:
    """Print the notes from reading the rows; ``skips``: whether a run skips the bad ones."""
    for note in rows.notes:
        echo_if_open(note, file=sys.stderr)
    if rows.skipped:
        listed = rows.problems[:PROBLEMS_SHOWN]
        more = [f"and {rows.skipped - len(listed)} more"] if listed and rows.skipped > len(listed) else []
        named = ":" + "".join(f"\n    {line}" for line in (*listed, *more)) if listed else ""
        without = " and are skipped" if skips else ""
        echo_if_open(f"warning: {rows.skipped} {noun}(s) cannot be used{without}{named}", file=sys.stderr)


def log_copies_among(rows: Rows) -> None:
    """Warn of identical images, in data sets small enough that every file is read before a run."""
    if len(rows) <= DECODE_CHECK_LIMIT:
        log_copies(rows.paths, rows.labels, rows.classes)


def log_copies(paths: Sequence[str], labels: np.ndarray, classes: Sequence[str]) -> None:
    """Warn of images that are identical byte for byte: if two have different labels, one label is wrong."""
    copies = find_copies(paths)
    same = [labels[copy.image] == labels[copy.earlier] for copy in copies]
    for kind, words, duplicates in (
        ("warning", "another image with another label", [copy for copy, is_same in zip(copies, same) if not is_same]),
        ("note", "another image with its label", [copy for copy, is_same in zip(copies, same) if is_same]),
    ):
        if duplicates:
            line = f"{kind}: {_count(len(duplicates), 'image is', 'images are')} byte for byte {words}:"
            for copy in duplicates[:COPIES_SHOWN]:
                here, there = (f"{paths[image]} ({_named(labels[image], classes)})" for image in copy)
                line += f"\n    {here} and {there}"
            echo_if_open(line, file=sys.stderr)


def log_classes(train: Rows, valid: Rows, num_classes: int, noun: str = "image") -> None:
    """Print the classes and sizes of the data set, and warn if classes of the model have no images."""
    labels, counts = np.unique(np.concatenate([train.labels, valid.labels]), return_counts=True)
    listed = [f"{_named(label, train.classes)} ({count})" for label, count in zip(labels.tolist(), counts.tolist())]
    if len(listed) > CLASSES_SHOWN:
        listed = [*listed[: CLASSES_SHOWN - 2], "...", listed[-1]]
    held_out = f", {len(valid)} held out" if len(valid) else ""
    line = f"{_count(len(labels), 'class', 'classes')}, {_count(len(train), noun, f'{noun}s')} to train on{held_out}: "
    echo_if_open(line + ", ".join(listed))
    log_empty_classes(labels, train.classes, num_classes, noun)


def log_empty_classes(labels: np.ndarray, classes: Sequence[str], num_classes: int, noun: str = "image") -> None:
    """Warn if some of ``num_classes`` are not among ``labels``, the labels of the data set (each once)."""
    if len(labels) < num_classes:
        without = num_classes - len(labels)
        empty = [_named(label, classes) for label in range(min(num_classes, len(classes))) if label not in labels]
        named = f" ({_short(empty)})" if empty else ""
        echo_if_open(
            f"warning: predictor.num_classes = {num_classes}, and {_count(without, 'class has', 'classes have')} no "
            f"{noun}s{named}: the model cannot learn them",
            file=sys.stderr,
        )


def check_classes(facts: Mapping[str, Any], classes: Sequence[str], path: Path) -> None:
    """Raise CheckpointError if a label had another name in the checkpoint ``path`` than in ``classes``.

    ``facts``: its run.json. One without names is accepted, and so are classes added or removed at the end.
    """
    before = facts.get("classes") or ()
    renamed = [label for label, (was, name) in enumerate(zip(before, classes)) if was != name]
    if renamed:
        label = renamed[0]
        raise CheckpointError(
            f"--load: {path}",
            f"label {label} was {before[label]!r} there and is {classes[label]!r} now "
            f"(classes there: {_short(before)}; now: {_short(classes)})",
            "restore the names of the folders or labels, or leave out --load and start over with another --save",
        )


def _named(label: int, classes: Sequence[str]) -> str:
    name = classes[label]
    return name if name == str(label) else f"{label} {name}"


def _count(number: int, singular: str, plural: str) -> str:
    return f"{number} {singular if number == 1 else plural}"


def _short(names: Sequence[str]) -> str:
    return ", ".join(names[:CLASSES_SHOWN]) + (", ..." if len(names) > CLASSES_SHOWN else "")
