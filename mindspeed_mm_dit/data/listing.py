"""The images a data.json names, with the class of each: folders, or a CSV. No image is opened."""

from __future__ import annotations

import csv
import io
import re
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from mindspeed_mm_dit.configs.data import DatasetParam
from mindspeed_mm_dit.data.builtin import BUILTIN_SOURCES
from mindspeed_mm_dit.errors import DataError

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm"}

_NUMBER = re.compile(r"-?\d+")


class Listing(NamedTuple):
    """Images and their classes, in the order of the index."""

    rows: list[tuple[str, int]]
    """(path below data_folder, label)."""
    classes: tuple[str, ...]
    """Name of every label; empty where the labels are numbers and no more."""


class _Row(NamedTuple):
    """A line of an index."""

    line: int
    image: str
    label: str


def list_images(param: DatasetParam) -> Listing:
    """Return every image of ``param`` and the names of the classes.

    Raises:
        DataError: naming the folder, or file and line.
    """
    folder = Path(param.data_folder)
    if param.source is not None and not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        BUILTIN_SOURCES[param.source](folder)
    if not folder.is_dir():
        raise DataError(f"dataset_param.data_folder = {folder}", "is not a folder", "correct the path in data.json")
    listing = _of_csv(folder / param.index) if param.index else _of_folders(folder)
    if not listing.rows:
        raise DataError(
            f"dataset_param.data_folder = {folder}",
            "holds no images",
            "put one folder of images per class there, or name an index with image_path,label",
        )
    return listing


def _of_folders(folder: Path) -> Listing:
    """Every sub-folder is a class, numbered in the order of their names; hidden and private ones are none."""
    classes = sorted(path for path in folder.iterdir() if path.is_dir() and not _is_hidden(path.name))
    rows = [
        (str(image.relative_to(folder)), label)
        for label, directory in enumerate(classes)
        for image in sorted(directory.rglob("*"))
        if image.suffix.lower() in IMAGE_SUFFIXES and not _lies_hidden(image.relative_to(directory))
    ]
    return Listing(rows, _composed(path.name for path in classes))


def _is_hidden(name: str) -> bool:
    """Return whether a folder is no class: .ipynb_checkpoints, __MACOSX and the like."""
    return name.startswith((".", "__"))


def _lies_hidden(image: Path) -> bool:
    return image.name.startswith(".") or any(map(_is_hidden, image.parts[:-1]))


def _composed(names: Iterable[str]) -> tuple[str, ...]:
    """Return ``names`` in Unicode's composed form, so that they compare equal whichever system wrote them."""
    return tuple(unicodedata.normalize("NFC", name) for name in names)


def _of_csv(path: Path) -> Listing:
    """Read image_path,label; labels that are not numbers are class names, numbered in sorted order."""
    rows = list(_csv_rows(path, _text_of(path)))
    images = [row.image for row in rows]
    if not _are_names(path, rows):
        return Listing(list(zip(images, (int(row.label) for row in rows))), ())
    names = sorted({row.label for row in rows})
    numbers = {name: number for number, name in enumerate(names)}
    return Listing(list(zip(images, (numbers[row.label] for row in rows))), _composed(names))


def _text_of(path: Path) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"dataset_param.index = {path}", f"cannot be read: {error.strerror}") from None
    try:
        return content.decode("utf-8-sig")  # Excel begins a file with a byte order mark
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise DataError(
            f"{path}: line {line}", f"is not UTF-8: byte 0x{content[error.start]:02x}", "save the file as UTF-8"
        ) from None


def _csv_rows(path: Path, text: str) -> Iterator[_Row]:
    reader = csv.DictReader(io.StringIO(text, newline=""))
    try:
        if not {"image_path", "label"} <= set(reader.fieldnames or ()):
            raise DataError(
                str(path), f"has the columns {reader.fieldnames}", "its first line must name image_path,label"
            )
        for row in reader:
            yield _row(f"{path}: line {reader.line_num}", reader.line_num, row)
    except csv.Error as error:
        raise DataError(f"{path}: line {reader.line_num}", f"is no CSV: {error}", "write the file again") from None


def _row(where: str, line: int, row: dict[str | None, str | list[str] | None]) -> _Row:
    surplus = [field for field in row.get(None) or () if field]
    if surplus:
        raise DataError(
            where, f"has more fields than the first line: {', '.join(surplus)}", "quote a path that holds a comma"
        )
    image, label = (str(row[column] or "") for column in ("image_path", "label"))
    for column, value in (("image_path", image), ("label", label)):
        if not value.strip():
            raise DataError(where, f"has no {column}", "write image_path,label in every line")
    return _Row(line, image, label.strip())


def _are_names(path: Path, rows: list[_Row]) -> bool:
    """Return whether the labels are names; raise DataError where some are and some are numbers."""
    numbers = [row for row in rows if _NUMBER.fullmatch(row.label)]
    names = [row for row in rows if not _NUMBER.fullmatch(row.label)]
    if numbers and names:
        few, many = sorted((numbers, names), key=len)
        kinds = ("a number", "names") if few is numbers else ("a name", "numbers")
        raise DataError(
            f"{path}: line {few[0].line}: label {few[0].label!r}",
            f"is {kinds[0]}; {len(many)} of {len(rows)} labels are {kinds[1]}, such as {many[0].label!r}",
            "write all labels as numbers, or all as names that are no numbers",
        )
    return bool(names)
