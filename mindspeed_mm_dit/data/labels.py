"""The one rule for class labels, whatever they are read from: all are whole numbers, or all are names.

Whole numbers are the labels themselves. Names are numbered in sorted order, or as the data set itself numbers them.
Folders called ``10_dog`` are read as kohya's trainers read them: images of the class dog, each 10 times in an epoch.
"""

from __future__ import annotations

import os
import re
import reprlib
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mindspeed_mm_dit.configs.images import DatasetParam
from mindspeed_mm_dit.data.sources import first_names
from mindspeed_mm_dit.errors import DataError

_NUMBER = re.compile(r"-?\d{1,18}")
_OTHER_NUMBER = re.compile(r"[+-]?((\d+\.?\d*|\.\d+)(e[+-]?\d+)?|nan|inf|infinity)", re.IGNORECASE)
"""A number that is not a label, e.g. 1.0, 1e3, nan."""
_MAX_NAMES = 10

ANY_CLASSES = 1_000_000
"""Bound on labels if no model is given."""

MAX_CLASS_REPEATS = 1000
"""A folder whose number is larger does not count as repeats: 2019_photos."""
_REPEATED = re.compile(r"([1-9]\d{0,3})_(.+)", re.DOTALL)

Named = Callable[[str], str]
"""label as written -> the first row that has it, in words, and the label"""


class Labels(NamedTuple):
    """The classes of some rows."""

    numbers: np.ndarray
    """(N,) int64."""
    classes: tuple[str, ...]
    """Name of every label; empty if the labels are plain numbers."""
    notes: tuple[str, ...] = ()
    """Lines for the user that begin with "note: " or "warning: "."""


def parse_labels(
    words: Sequence[str],
    where: str,
    location: Callable[[int], str],
    stated: Sequence[str] = (),
    known_classes: Sequence[str] = (),
) -> Labels:
    """Return the labels of rows whose classes are written as ``words``.

    where: the data set, in notes. location: what to call a row in errors. stated: names in the order of their labels,
    if the data set lists them. known_classes: class names of a run or cache to continue; the same set of names keeps
    its numbers.

    Raises:
        DataError: a row has no label, or one that is neither a whole number nor a name, or numbers and names are mixed.
    """
    words = normalize_names(words)
    counts = Counter(words)
    named: Named = lambda word: f"{location(words.index(word))}: label {reprlib.repr(word)}"  # noqa: E731
    if "" in counts:
        raise DataError(f"{location(words.index(''))} has no label. Write a label in every row.")
    if known_classes and set(known_classes) == set(stated or counts):
        names, notes = tuple(known_classes), _note_of_old_numbers(where, known_classes)
    else:
        names = tuple(stated) or _names_in(counts, named)
        notes = _notes_of_similar(where, names or counts)
    known = {name: number for number, name in enumerate(names)}
    numbers = {word: _number_of(word, known, named) for word in counts}
    return Labels(np.array([numbers[word] for word in words], np.int64), names, notes)


def normalize_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return ``names`` in Unicode's composed form, so that names from different systems compare equal."""
    return tuple(unicodedata.normalize("NFC", name) for name in names)


def check_labels(
    labels: np.ndarray, num_classes: int | None, location: Callable[[int], str], classes: Sequence[str] = ()
) -> None:
    """Raise DataError if a label (N,) is not a class of a model of ``num_classes``; None: of any model.

    classes: name of every label, if they are names.
    """
    end = ANY_CLASSES if num_classes is None else num_classes
    for row in np.flatnonzero((labels < 0) | (labels >= end))[:1].tolist():
        label, setting = labels[row], "" if num_classes is None else f" (predictor.num_classes = {end})"
        if 0 <= label < len(classes) and classes[label] != str(label):
            raise DataError(
                f"{location(row)} is of class {classes[label]}, one of {len(classes)} "
                f"({first_names(classes, _MAX_NAMES)}), but the model has {end}{setting}. Remove its images, or begin "
                f"a new run with num_classes = {len(classes)} in model.json."
            )
        raise DataError(
            f"{location(row)} has the label {label}, which is outside 0 ... {end - 1}{setting}. Correct the label, or "
            "num_classes in model.json. A name that is a number counts as the label."
        )


def names_for_labels(names: tuple[str, ...], labels: np.ndarray) -> tuple[str, ...]:
    """Return a name for each class up to the largest of ``labels``: one of ``names``, or its number."""
    return names + tuple(map(str, range(len(names), 1 + int(labels.max()))))


def _names_in(counts: Mapping[str, int], named: Named) -> tuple[str, ...]:
    """Return the labels that are names, sorted; none if all are numbers. Raise DataError if they are mixed."""
    numbers = [word for word in counts if _NUMBER.fullmatch(word)]
    names = [word for word in counts if not _NUMBER.fullmatch(word)]
    if bad := next(filter(_OTHER_NUMBER.fullmatch, names), None):
        raise DataError(
            f"{named(bad)} is neither a whole number nor a name. Write labels as 0, 1, 2, ..., or as names."
        )
    if numbers and names:
        few, many = sorted((numbers, names), key=lambda words: sum(counts[word] for word in words))
        kinds = ("a number", "names") if few is numbers else ("a name", "numbers")
        counted = f"{sum(counts[word] for word in many)} of {sum(counts.values())}"
        raise DataError(
            f"{named(few[0])} is {kinds[0]}, but {counted} labels are {kinds[1]}, such as {reprlib.repr(many[0])}. "
            "Write all labels as numbers, or all as names that are not numbers."
        )
    return tuple(sorted(names))


def _number_of(word: str, known: Mapping[str, int], named: Named) -> int:
    """Return the label of ``word``, one of the ``known`` names; a number may lie beyond them."""
    if word in known:
        return known[word]
    if _NUMBER.fullmatch(word) and int(word) not in range(len(known)):
        return int(word)
    raise DataError(
        f"{named(word)} is not one of the classes that the data set lists ({first_names(list(known), _MAX_NAMES)}). "
        "Name one of these."
    )


def _notes_of_similar(where: str, words: Collection[str]) -> tuple[str, ...]:
    """Return warnings of names that differ little, and of numbers with two spellings."""
    first: dict[str | int, str] = {}
    notes = []
    for word in words:
        key = int(word) if _NUMBER.fullmatch(word) else " ".join(word.casefold().split())
        if (other := first.setdefault(key, word)) != word:
            kind = "one class" if isinstance(key, int) else "two classes"
            notes.append(f"warning: {where}: {other!r} and {word!r} are {kind}")
    return tuple(notes)


def _note_of_old_numbers(where: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return a note if names that are numbers keep other numbers, as a run to continue has them."""
    other = [(name, n) for n, name in enumerate(names) if _NUMBER.fullmatch(name) and int(name) != n]
    return tuple(
        f"note: {where}: classes keep the numbers they had: {name!r} is label {number}" for name, number in other[:1]
    )


def split_names(
    names: Sequence[str], setting: bool | None, known_classes: Sequence[str] = ()
) -> list[tuple[int, str]] | None:
    """Return repeats and class for each folder of images; None if the names mean no repeats.

    setting: ``DatasetParam.folder_repeats``. known_classes: class names of a run or cache to continue, which may be
    whole names of folders.

    Raises:
        DataError: repeats are requested, and a folder has another kind of name.
    """
    matches = [_REPEATED.fullmatch(name) for name in names]
    pairs = [(int(match[1]), match[2]) for match in matches if match and int(match[1]) <= MAX_CLASS_REPEATS]
    if setting:
        if wrong := [name for name, match in zip(names, matches) if not match or int(match[1]) > MAX_CLASS_REPEATS]:
            raise DataError(
                "dataset_param.folder_repeats = true needs folders named like 10_dog, with a number from 1 to "
                f"{MAX_CLASS_REPEATS}, and {wrong[0]} is not. Rename it, or drop the setting."
            )
        return pairs
    if setting is False or not pairs or len(pairs) < len(names) or set(known_classes) & set(names):
        return None
    numbers = sorted(number for number, _ in pairs)  # (1_cat and 2_dog are merely numbered in a row)
    return None if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[0] + len(numbers))) else pairs


def repeats_of(
    paths: Sequence[str], param: DatasetParam, known_classes: Sequence[str] = ()
) -> tuple[np.ndarray | None, tuple[str, ...]]:
    """Return how often an epoch takes each image, (N,) int64, and a note on it; None and no note without repeats.

    paths: below ``data_folder``; the first folder of each decides. An index and shards have no repeats.
    """
    if param.index is not None or param.dataset_type != "image_folder" or not paths:
        return None, ()
    folders = [path.partition(os.sep)[0] if os.sep in path else "" for path in paths]
    names = sorted(set(folders))
    if (pairs := split_names(names, param.folder_repeats, known_classes)) is None:
        return None, ()
    repeats = dict(zip(names, (number for number, _ in pairs)))
    words = ", ".join(f"{name} {repeats[name]} times" for name in names[:5])
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    note = (
        f"note: an epoch takes each image of {words}{more}: the number before the name is read as repeats, as in "
        "kohya's trainers; dataset_param.folder_repeats = false reads it as part of the name"
    )
    return np.array([repeats[folder] for folder in folders], np.int64), (note,)
