"""Finds the captions of a folder of images: in files beside them, in an index, in shards; or finds that it has none."""

from __future__ import annotations

import dataclasses
import json
import posixpath
import re
from collections import Counter
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

import numpy as np

from mindspeed_mm_dit.configs.files import UnusableFile, is_folder, read_bytes
from mindspeed_mm_dit.configs.images import DatasetParam
from mindspeed_mm_dit.data.image_captions import read_sidecar_captions
from mindspeed_mm_dit.data.labels_csv import IMAGE_NAMES, JSONL, MOST_OF_A_LINE, columns_of, read_labels
from mindspeed_mm_dit.data.listing import class_folders, is_hidden, list_images
from mindspeed_mm_dit.data.parquet_rows import columns_of_texts
from mindspeed_mm_dit.data.shards import KINDS
from mindspeed_mm_dit.data.tar_rows import members
from mindspeed_mm_dit.errors import ConfigError, DataError
from mindspeed_mm_dit.tools.planning.folder_classes import FolderClasses, shards_in

COLUMNS = ("caption", "captions", "text", "texts", "prompt", "description")
"""What a column or a JSON key of captions is called, as on the hub."""
ENDINGS = (".txt", ".caption", *(f".json:{name}" for name in COLUMNS))
"""Files of captions beside an image or in a tar: kohya's, webdataset's."""
SOME, ENOUGH = 200, 0.5
"""Images whose captions are looked for, and the part of them that must have one with a letter."""
NONE = "none"
LISTS = (".txt", ".tsv", ".tab", ".json")
SHEETS = (".xlsx", ".xls", ".ods", ".numbers")
"""Endings of files that hold captions elsewhere: one for all images, as text, or a spreadsheet."""


def captions_of_folder(images: str, wanted: str | None = None) -> FolderClasses | None:
    """Return where the captions of ``images``, a folder or an index in one, are; None if it has none.

    ``wanted``: the value of dataset_param.captions to look for, or NONE.

    Raises:
        ConfigError: there are no captions at the place that is ``wanted``, or few images have one.
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
    """Raise ConfigError if a file in ``images``, a folder without classes, may hold captions and is not read."""
    folder = Path(images)
    if not is_folder(folder) or len(class_folders(folder)) > 1:
        return
    with suppress(DataError, OSError):
        paths = [Path(path) for path, _ in list_images(DatasetParam(images, 8, single_class=True)).rows]
        names, block_prefixes = {path.name for path in paths}, {path.stem for path in paths}
        for file in _indices(folder):
            if names & _words_of(file):
                _check_table(file)
        for file in _of_no_single_image(folder, names | block_prefixes):
            if file.suffix.lower() in SHEETS or (
                file.suffix.lower() in LISTS and _tells_of(file, names, block_prefixes)
            ):
                raise ConfigError(
                    f"IMAGES = {images}",
                    f"{file.name} may hold the captions, but they are not read from such a file",
                    "save it as captions.csv, in UTF-8, with a first line file_name,caption; or leave it out with "
                    f"--captions {NONE}",
                )


def texts_in_sidecars(images: str) -> list[str]:
    """Return the places, such as .json:tags, of texts in the .json beside most images: captions by another name."""
    some = _some_of(Path(images))
    there: set[str] = set()
    for file in [file for image in some[:1] for file in (image.with_suffix(".json"), Path(f"{image}.json"))]:
        with suppress(UnusableFile):
            there |= _keys(read_bytes(file))
    texts = [place for place, count in _counts(some[:1], sorted(there)).items() if count]
    return [place for place, count in _counts(some, texts).items() if count >= ENOUGH * len(some)]


def _of_no_single_image(folder: Path, of_images: set[str]) -> list[Path]:
    """Return the files of a folder whose names do not begin as one of an image, up to a dot."""
    files = (file for file in sorted(folder.iterdir()) if not is_hidden(file.name) and file.is_file())
    return [file for file in files if of_images.isdisjoint(accumulate(file.name.split("."), "{}.{}".format))]


def _tells_of(file: Path, names: set[str], block_prefixes: set[str]) -> bool:
    """Return whether a file names images, or most of their stems, and says more of them than that."""
    words = _words_of(file)
    named = {word for word in words if word in names or posixpath.splitext(word)[0] in block_prefixes}
    return (bool(words & names) or 2 * len(named) > len(block_prefixes)) and any(
        map(str.isalpha, "".join(words - named))
    )


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
    words = (*re.split(r'[,;|\t"\r\n]+', text), *re.split(r'[\s,;:|"]+', text))  # (names may hold spaces)
    return {posixpath.basename(word.strip()) for word in words}


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
        return {f".json:{key}" for key in json.loads(content).keys()}  # noqa: SIM118 (of an object alone)
    except (ValueError, AttributeError, RecursionError):
        return set()


def _beside(folder: Path, places: tuple[str, ...], enough: float) -> FolderClasses | None:
    """Return the ending of the files beside some images; texts without a letter are no captions.

    Raises:
        ConfigError: less than the part ``enough`` of the images has captions: those or the others would be lost.
    """
    some = _some_of(folder)
    counts = _counts(some, [place for place in places if place.startswith(".")])
    place, count = next(iter(counts.most_common(1)), ("", 0))
    if not count:
        return None
    if count < enough * len(some):
        raise ConfigError(
            f"IMAGES = {folder}",
            f"of {len(some)} images looked at, only {count} with a caption in a {place} beside it",
            f"write the others, or learn those alone with --captions {place}, or classes with --captions {NONE}",
        )
    return FolderClasses(str(folder), None, False, f"each image has its caption in a {place} beside it", captions=place)


def _some_of(folder: Path) -> list[Path]:
    """Return images from all parts of a folder; none if it has none."""
    try:
        rows = list_images(DatasetParam(str(folder), 8, single_class=True)).rows
    except DataError:
        return []
    return [folder / rows[int(n)][0] for n in np.linspace(0, len(rows) - 1, min(SOME, len(rows)))]


def _counts(images: list[Path], places: list[str]) -> Counter[str]:
    """Return how many of the ``images`` have a caption with a letter in each of the ``places``."""
    told = {place: read_sidecar_captions(images, [place]) for place in places}
    return Counter(
        {
            place: sum(own.other_encoding or any(map(str.isalpha, " ".join(own.captions))) for own in found)
            for place, found in told.items()
        }
    )
