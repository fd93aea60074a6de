"""Finds the captions of a folder of images: in files beside them, in an index, in shards; or finds that it has none."""

from __future__ import annotations

import dataclasses
import json
import posixpath
import re
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np

from mindspeed_mm_dit.configs.files import is_folder
from mindspeed_mm_dit.configs.images import DatasetParam
from mindspeed_mm_dit.data.image_captions import captions_beside
from mindspeed_mm_dit.data.labels_csv import IMAGE_NAMES, JSONL, MOST_OF_A_LINE, columns_of, read_labels
from mindspeed_mm_dit.data.listing import class_folders, list_images
from mindspeed_mm_dit.data.parquet_rows import columns_of_texts
from mindspeed_mm_dit.data.shards import KINDS
from mindspeed_mm_dit.data.tar_rows import members
from mindspeed_mm_dit.errors import ConfigError, DataError
from mindspeed_mm_dit.wings.advice.folder_classes import FolderClasses, shards_in

COLUMNS = ("caption", "captions", "text", "texts", "prompt", "description")
"""What a column or a JSON key of captions is called, as on the hub."""
ENDINGS = (".txt", ".caption", *(f".json:{name}" for name in COLUMNS))
"""Files of captions beside an image or in a tar: kohya's, webdataset's."""
SOME, ENOUGH = 200, 0.5
"""Images whose captions are looked for, and the part of them that must have one with a letter."""
NONE = "none"


def captions_of_folder(images: str, wanted: str | None = None) -> FolderClasses | None:
    """Return where the captions of ``images``, a folder or an index in one, are; None if it has none.

    ``wanted``: the value of dataset_param.captions to look for, or NONE.

    Raises:
        ConfigError: there are no captions at the place that is ``wanted``.
    """
    path = Path(images)
    if wanted == NONE or not path.exists():
        return None
    places = (wanted,) if wanted else (*COLUMNS, *ENDINGS)
    if not is_folder(path):
        found = _in_index(path, places)
    elif shards := shards_in(path):
        found = _in_shards(shards, places)
    else:
        found = next(filter(None, (_in_index(file, places) for file in _indices(path))), None)
        found = found or _beside(path, places, 0 if wanted else ENOUGH)
    if wanted and not found:
        raise ConfigError(f"--captions = {wanted}", f"{images} has no captions there", "name a column, or an ending "
                          'such as .txt or .json:caption; "none" learns classes')  # fmt: skip
    return found


def check_tables(images: str) -> None:
    """Raise ConfigError if ``images`` is a folder without classes whose table names its images and cannot be read."""
    folder = Path(images)
    if not is_folder(folder) or len(class_folders(folder)) > 1:
        return
    with suppress(DataError, OSError):
        names = {posixpath.basename(path) for path, _ in list_images(DatasetParam(images, 8, single_class=True)).rows}
        for file in _indices(folder):
            if names & _words_of(file):
                _check_table(file)


def _check_table(file: Path) -> None:
    try:
        read_labels(file, labelled=False, captions=COLUMNS[:1])
    except DataError as error:
        cure = f"{error.cure}; --captions names another column of captions, or none to leave the table out"
        raise ConfigError(error.what, f"names the images, and {error.reason}", cure) from None


def _words_of(file: Path) -> set[str]:
    """Return the names of files that fields of a table may be, whatever its letters and separators are."""
    with open(file, "rb") as table:
        content = table.read(MOST_OF_A_LINE)
    text = content.decode("utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8", "replace")
    return {posixpath.basename(word.strip()) for word in re.split(r'[,;|\t"\r\n]+', text)}


def _indices(folder: Path) -> list[Path]:
    """Return the tables of a folder; the hub's metadata.csv or .jsonl comes first."""
    found = (file for file in sorted(folder.iterdir()) if file.suffix.lower() in (".csv", JSONL))
    return sorted(found, key=lambda file: file.stem != "metadata")


def _in_index(file: Path, places: tuple[str, ...]) -> FolderClasses | None:
    columns = columns_of(file)
    place = next((name for name in places if name in columns), None)
    if place is None or not set(IMAGE_NAMES) & set(columns):
        return None
    return FolderClasses(str(file.parent), file.name, False, f"column {place} of {file.name} has captions",
                         captions=place)  # fmt: skip


def _in_shards(shards: FolderClasses, places: tuple[str, ...]) -> FolderClasses | None:
    suffix = KINDS[shards.dataset_type].suffix
    file = min(Path(shards.data_folder).rglob(f"{shards.split or ''}*{suffix}"))
    there = columns_of_texts(file) if shards.dataset_type == "parquet" else _in_tar(file)
    place = next((place for place in places if place in there), None)
    if place is None:
        return None
    return dataclasses.replace(shards, captions=place, reason=f"{place} of the {suffix} files has captions")


def _in_tar(file: Path) -> set[str]:
    """Return the places of captions among the first files of a tar."""
    found = set()
    with open(file, "rb") as tar:
        for member, _ in zip(members(tar), range(SOME)):
            ending = "." + member.name.rpartition("/")[2].partition(".")[2].lower()
            found.add(ending)
            if ending == ".json":
                tar.seek(member.offset)
                found |= _keys(tar.read(member.size))
    return found


def _keys(content: bytes) -> set[str]:
    try:
        return {f".json:{key}" for key in json.loads(content)}
    except (ValueError, TypeError, RecursionError):
        return set()


def _beside(folder: Path, places: tuple[str, ...], enough: float) -> FolderClasses | None:
    """Return the ending of the files beside this part of some images; texts without a letter are no captions."""
    try:
        rows = list_images(DatasetParam(str(folder), 8, single_class=True)).rows
    except DataError:
        return None
    some = [folder / rows[int(n)][0] for n in np.linspace(0, len(rows) - 1, min(SOME, len(rows)))]
    counts = Counter(
        {
            place: sum(any(map(str.isalpha, " ".join(told.captions))) for told in captions_beside(some, [place]))
            for place in places
            if place.startswith(".")
        }
    )
    place, count = next(iter(counts.most_common(1)), ("", 0))
    if not count or count < enough * len(some):
        return None
    return FolderClasses(str(folder), None, False, f"each image has its caption in a {place} beside it", captions=place)
