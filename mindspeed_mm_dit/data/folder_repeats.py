"""Folders called ``10_dog``, as kohya's trainers read them: images of the class dog, each 10 times in an epoch."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import numpy as np

from mindspeed_mm_dit.configs.images import DatasetParam
from mindspeed_mm_dit.errors import DataError

MOST_REPEATS = 1000
"""A folder whose number is larger does not count as repeats: 2019_photos."""
MAX_NAMES = 5
_NAME = re.compile(r"([1-9]\d{0,3})_(.+)", re.DOTALL)


def split_names(
    names: Sequence[str], setting: bool | None, known_classes: Sequence[str] = ()
) -> list[tuple[int, str]] | None:
    """Return repeats and class for each folder of images; None if the names mean no repeats.

    setting: ``DatasetParam.folder_repeats``. known_classes: class names of a run or cache to continue, which may be
    whole names of folders.

    Raises:
        DataError: repeats are requested, and a folder has another kind of name.
    """
    matches = [_NAME.fullmatch(name) for name in names]
    pairs = [(int(match[1]), match[2]) for match in matches if match and int(match[1]) <= MOST_REPEATS]
    if setting:
        if wrong := [name for name, match in zip(names, matches) if not match or int(match[1]) > MOST_REPEATS]:
            raise DataError(
                "dataset_param.folder_repeats = true",
                f"the folder {wrong[0]} is not called like 10_dog, with a number from 1 to {MOST_REPEATS}",
                "rename it, or drop the setting",
            )
        return pairs
    is_off = setting is False or not pairs or len(pairs) < len(names) or set(known_classes) & set(names)
    return None if is_off or _are_numbered(pairs) else pairs


def _are_numbered(pairs: Sequence[tuple[int, str]]) -> bool:
    """Return whether several folders are merely numbered in a row, such as 1_cat and 2_dog."""
    numbers = sorted(number for number, _ in pairs)
    return len(numbers) > 1 and numbers == list(range(numbers[0], numbers[0] + len(numbers)))


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
    words = ", ".join(f"{name} {repeats[name]} times" for name in names[:MAX_NAMES])
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    note = (
        f"note: an epoch takes each image of {words}{more}: the number before the name is read as repeats, as in "
        "kohya's trainers; dataset_param.folder_repeats = false reads it as part of the name"
    )
    return np.array([repeats[folder] for folder in folders], np.int64), (note,)
