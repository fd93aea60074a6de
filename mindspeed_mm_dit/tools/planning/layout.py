"""Detect how an image folder encodes its classes: by an index, by folders, or not at all."""

from __future__ import annotations

import dataclasses
import json
import posixpath
import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.files import UnusableFile, is_folder, read_bytes, suggest_path
from mindspeed_mm_dit.configs.images import DatasetParam, ImageFiles
from mindspeed_mm_dit.data.captions import read_sidecar_captions
from mindspeed_mm_dit.data.listing import (
    UNPACK_AGAIN,
    class_folders,
    find_index_files,
    flattened_images,
    is_hidden,
    list_class_folders,
    list_images,
)
from mindspeed_mm_dit.data.shard_rows import members, text_columns
from mindspeed_mm_dit.data.shards import KINDS
from mindspeed_mm_dit.data.tables import IMAGE_NAMES, JSONL, MAX_LINE_LETTERS, is_index, read_columns, read_table
from mindspeed_mm_dit.errors import ConfigError, DataError

LABELS = "labels.csv"
"""Name of the index to use if a folder has several CSV files."""
SPLITS = ("train", "training", "val", "valid", "validation", "test", "testing")
"""Names of folders that are splits, not classes; the training split comes first."""


@dataclass(frozen=True)
class FolderLayout:
    """How the images encode their classes or captions: the fields are keys of dataset_param in data.json."""

    data_folder: str
    index: str | None
    single_class: bool
    reason: str
    """What the folder contains, as an explanation for the user."""
    dataset_type: ImageFiles = "image_folder"
    split: str | None = None
    captions: str | None = None


def classes_of_folder(images: str) -> FolderLayout:
    """Return how ``images``, a folder or an index in one, encodes its classes.

    Raises:
        ConfigError: the path does not exist, or its layout is ambiguous.
    """
    path = Path(images)
    if not is_folder(path):
        if not is_index(path):
            raise ConfigError(f"IMAGES = {images} {_problem(path)}. {suggest_path(path)}Name a folder of images.")
        return FolderLayout(str(path.parent), path.name, False, f"{path.name} names the class of each image")
    if shards := shards_in(path):
        return shards
    indices = find_index_files(path)
    if LABELS in indices or len(indices) == 1:
        index = LABELS if LABELS in indices else indices[0]
        return FolderLayout(images, index, False, f"{index} names the class of each image")
    if indices:
        raise ConfigError(
            f"IMAGES = {images} holds several indices: {', '.join(indices)}. Name one: {path / indices[0]}."
        )
    if (path / LABELS).is_file():
        raise ConfigError(
            f"IMAGES = {images} has a {LABELS} that does not begin with the columns image_path,label, in UTF-8. "
            "Correct its first line or save it as UTF-8; to ignore it, rename it."
        )
    folders = class_folders(path)
    splits = sorted(
        (folder.name for folder in folders if folder.name.lower() in SPLITS),
        key=lambda name: SPLITS.index(name.lower()),
    )
    if splits and len(splits) == len(folders):
        raise ConfigError(
            f"IMAGES = {images} has splits ({', '.join(splits)}) and no classes. Name {path / splits[0]}."
        )
    if list_class_folders(path).rows:
        return FolderLayout(images, None, False, "every folder in it is a class")
    if lost := flattened_images(entry.name for entry in path.iterdir()):
        raise ConfigError(
            f"IMAGES = {images} has files such as {lost[0]} in place of folders: a backslash is no folder here. If "
            f"these were folders, {UNPACK_AGAIN}."
        )
    return FolderLayout(images, None, True, "no folder in it holds images, so all are of one class")


def shards_in(path: Path) -> FolderLayout | None:
    """Return the layout of a folder with shards in it or, as on the hub, in its folder ``data``."""
    for name, kind in KINDS.items():
        suffix = kind.suffix
        names = [file.name for folder in (path, path / "data") for file in folder.glob(f"*{suffix}")]
        if names:
            split = "train" if any(file.startswith("train") for file in names) else None
            return FolderLayout(
                str(path), None, False, f"shards that end in {suffix} say the class of each row", name, split
            )
    return None


def _problem(path: Path) -> str:
    if not path.exists():
        return "is a link to nothing" if path.is_symlink() else "does not exist"
    return "is a file, and no index with the columns image_path,label"


COLUMNS = ("caption", "captions", "text", "texts", "prompt", "description")
"""Usual names of a caption column or JSON key, as on the Hugging Face hub."""
ENDINGS = (".txt", ".caption", *(f".json:{name}" for name in COLUMNS))
"""Endings of caption files next to an image or in a tar, as in kohya's tools and webdataset."""
SOME, ENOUGH = 200, 0.5
"""Number of images to inspect, and the fraction of them that must have a caption with a letter."""
NONE = "none"
LISTS = (".txt", ".tsv", ".tab", ".json")
SHEETS = (".xlsx", ".xls", ".ods", ".numbers")
"""Endings of files in which other tools keep the captions of all images: text lists, and spreadsheets."""


def captions_of_folder(images: str, location: str | None = None) -> FolderLayout | None:
    """Return the layout of ``images``, a folder or an index in one, with its captions; None if it has none.

    ``location``: the value of dataset_param.captions to look for, or NONE; None tries all usual ones.

    Raises:
        ConfigError: there are no captions at ``location``, or only few images have one.
    """
    path = Path(images)
    if location == NONE or not path.exists():
        return None
    locations = (location,) if location else (*COLUMNS, *ENDINGS)
    if not is_folder(path):
        layout = _in_index(path, locations)
    elif shards := shards_in(path):
        layout = _in_shards(shards, locations)
    else:
        layout = next(filter(None, (_in_index(file, locations) for file in _indices(path))), None)
        layout = layout or _in_sidecars(path, locations, 0 if location else ENOUGH)
    if location and not layout:
        raise ConfigError(
            f"--captions = {location} is not where {images} has captions. Name a column, or an ending such as .txt or "
            '.json:caption; "none" learns classes.'
        )
    return layout


def check_tables(images: str) -> None:
    """Raise ConfigError if a file in ``images``, a folder without classes, may hold captions and is not read."""
    folder = Path(images)
    if not is_folder(folder) or len(class_folders(folder)) > 1:
        return
    with suppress(DataError, OSError):
        paths = [Path(path) for path, _ in list_images(DatasetParam(images, 8, single_class=True)).rows]
        names, base_names = {path.name for path in paths}, {path.stem for path in paths}
        for file in _indices(folder):
            if names & _words_of(file):
                _check_table(file)
        for file in _unpaired_files(folder, names | base_names):
            if file.suffix.lower() in SHEETS or (
                file.suffix.lower() in LISTS and _lists_images(file, names, base_names)
            ):
                raise ConfigError(
                    f"IMAGES = {images} has {file.name}, which may hold the captions and is no file that is read. Save "
                    "it as captions.csv, in UTF-8, with a first line file_name,caption; or leave it out with "
                    f"--captions {NONE}."
                )


def texts_in_sidecars(images: str) -> list[str]:
    """Return further keys (as in .json:tags) with texts in the .json files of most images: possible captions."""
    some = _spread_sample(Path(images))
    keys: set[str] = set()
    for file in [file for image in some[:1] for file in (image.with_suffix(".json"), Path(f"{image}.json"))]:
        with suppress(UnusableFile):
            keys |= _keys(read_bytes(file))
    texts = [location for location, count in _counts(some[:1], sorted(keys)).items() if count]
    return [location for location, count in _counts(some, texts).items() if count >= ENOUGH * len(some)]


def _unpaired_files(folder: Path, of_images: set[str]) -> list[Path]:
    """Return the files of a folder whose names do not begin as one of an image, up to a dot."""
    files = (file for file in sorted(folder.iterdir()) if not is_hidden(file.name) and file.is_file())
    return [file for file in files if of_images.isdisjoint(accumulate(file.name.split("."), "{}.{}".format))]


def _lists_images(file: Path, names: set[str], base_names: set[str]) -> bool:
    """Return whether a file lists images (or most of their base names) together with further text."""
    words = _words_of(file)
    named = {word for word in words if word in names or posixpath.splitext(word)[0] in base_names}
    return (bool(words & names) or 2 * len(named) > len(base_names)) and any(map(str.isalpha, "".join(words - named)))


def _check_table(file: Path) -> None:
    try:
        read_table(file, labelled=False, captions=COLUMNS[:1])
    except DataError as error:
        raise ConfigError(
            f"IMAGES has a table that names the images, and cannot be read. {error} Name another column of captions by "
            f"--captions, or leave the table out with --captions {NONE}."
        ) from None


def _words_of(file: Path) -> set[str]:
    """Return the fields of a table that may be file names, for any common encoding and separator."""
    with open(file, "rb") as table:
        content = table.read(MAX_LINE_LETTERS)
    text = content.decode("utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8", "replace")
    words = (*re.split(r'[,;|\t"\r\n]+', text), *re.split(r'[\s,;:|"]+', text))  # (names may hold spaces)
    return {posixpath.basename(word.strip()) for word in words}


def _indices(folder: Path) -> list[Path]:
    """Return the tables of a folder; the hub's metadata.csv or .jsonl comes first."""
    tables = (file for file in sorted(folder.iterdir()) if file.suffix.lower() in (".csv", JSONL))
    return sorted(tables, key=lambda file: file.stem != "metadata")


def _in_index(file: Path, locations: tuple[str, ...]) -> FolderLayout | None:
    columns = read_columns(file)
    location = next((name for name in locations if name in columns), None)
    if location is None or not set(IMAGE_NAMES) & set(columns):
        return None
    return FolderLayout(
        str(file.parent), file.name, False, f"column {location} of {file.name} has captions", captions=location
    )


def _in_shards(shards: FolderLayout, locations: tuple[str, ...]) -> FolderLayout | None:
    suffix = KINDS[shards.dataset_type].suffix
    file = min(Path(shards.data_folder).rglob(f"{shards.split or ''}*{suffix}"))
    available = text_columns(file) if shards.dataset_type == "parquet" else _in_tar(file)
    location = next((location for location in locations if location in available), None)
    if location is None:
        return None
    return dataclasses.replace(shards, captions=location, reason=f"{location} of the {suffix} files has captions")


def _in_tar(file: Path) -> set[str]:
    """Return the locations of possible captions (endings, JSON keys) among the first files of a tar."""
    locations = set()
    with open(file, "rb") as tar:
        for member, _ in zip(members(tar), range(SOME)):
            ending = "." + member.name.rpartition("/")[2].partition(".")[2].lower()
            locations.add(ending)
            if ending == ".json":
                tar.seek(member.offset_data)
                locations |= _keys(tar.read(member.size))
    return locations


def _keys(content: bytes) -> set[str]:
    try:
        return {f".json:{key}" for key in json.loads(content).keys()}  # noqa: SIM118 (of an object alone)
    except (ValueError, AttributeError, RecursionError):
        return set()


def _in_sidecars(folder: Path, locations: tuple[str, ...], enough: float) -> FolderLayout | None:
    """Return the layout with captions in sidecar files; texts without a letter do not count as captions.

    Raises:
        ConfigError: less than the fraction ``enough`` of the images has captions.
    """
    some = _spread_sample(folder)
    counts = _counts(some, [location for location in locations if location.startswith(".")])
    location, count = next(iter(counts.most_common(1)), ("", 0))
    if not count:
        return None
    if count < enough * len(some):
        raise ConfigError(
            f"IMAGES = {folder} has only {count} image(s) with a caption in a {location} beside it, out of {len(some)} "
            f"looked at. Write the others, or learn those alone with --captions {location}, or classes with --captions "
            f"{NONE}."
        )
    return FolderLayout(
        str(folder), None, False, f"each image has its caption in a {location} beside it", captions=location
    )


def _spread_sample(folder: Path) -> list[Path]:
    """Return up to SOME images, spread evenly over a folder."""
    try:
        rows = list_images(DatasetParam(str(folder), 8, single_class=True)).rows
    except DataError:
        return []
    return [folder / rows[int(n)][0] for n in np.linspace(0, len(rows) - 1, min(SOME, len(rows)))]


def _counts(images: list[Path], locations: list[str]) -> Counter[str]:
    """Count the ``images`` that have a caption with a letter, for each of the ``locations``."""

    def has_caption(sidecar: Any) -> bool:
        return sidecar.other_encoding or any(map(str.isalpha, " ".join(sidecar.captions)))

    captions = {location: read_sidecar_captions(images, [location]) for location in locations}
    return Counter({location: sum(map(has_caption, sidecars)) for location, sidecars in captions.items()})
