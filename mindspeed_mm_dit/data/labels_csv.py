"""Reads the index of a data folder: a CSV with the columns image_path,label, one line per image.

An index of captions has the columns that data.json names, and may lack labels. Its image column may also be called
file_name, as on the hub, or file or image. An image may have several lines, each with a caption.
"""

from __future__ import annotations

import csv
import io
import posixpath
import reprlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from mindspeed_mm_dit.configs.files import UnusableFile, check_file, read_bytes
from mindspeed_mm_dit.data.image_captions import Told
from mindspeed_mm_dit.data.labels import composed, labels_of
from mindspeed_mm_dit.errors import DataError

IMAGE, LABEL = "image_path", "label"
COLUMNS = (IMAGE, LABEL)
IMAGE_NAMES = (IMAGE, "file_name", "file", "image")
"""Possible names of the image column in an index of captions."""

_DELIMITERS = {";": "semicolons", "\t": "tabs", "|": "bars"}


class Row(NamedTuple):
    """A line of an index."""

    line: int
    image: str
    """Normalized path, relative to the folder of the images."""
    label: str
    """A number or a name, in Unicode's composed form; "" if labels are not requested."""
    captions: tuple[str, ...] = ()


class Labelled(NamedTuple):
    """Images with their classes, in the order of the lines."""

    rows: list[tuple[str, int]]
    """(path below data_folder, label)."""
    classes: tuple[str, ...]
    """Name of every label; empty if the labels are plain numbers."""
    told: tuple[Told, ...] = ()
    """Captions of each image; empty if captions are not requested."""
    notes: tuple[str, ...] = ()
    """Lines for the user that begin with "note: " or "warning: "."""


def read_labels(
    path: Path, labelled: bool = True, captions: tuple[str, ...] = (), kept: Sequence[str] = ()
) -> Labelled:
    """Read an index; labels that are not numbers are class names, numbered in sorted order.

    labelled: whether labels are requested; if not, all are 0. captions: names of the caption columns. kept: class names
    of a run or cache to go on with.

    Raises:
        DataError: naming file, line and cure.
    """
    rows = list(_csv_rows(path, _text_of(path), labelled, captions))
    _check_one_label_each(path, rows)
    if not captions:
        return _labelled(path, rows, kept)
    offered: dict[str, list[Row]] = {}
    for row in rows:
        offered.setdefault(row.image, []).append(row)
    told = tuple(_told(path, own, captions) for own in offered.values())
    found = _labelled(path, [own[0] for own in offered.values()], kept)
    return found._replace(told=told)


def _told(path: Path, rows: list[Row], columns: tuple[str, ...]) -> Told:
    captions = tuple(caption for row in rows for caption in row.captions)
    where = f"{path.name}, line {rows[0].line}"
    return Told(captions, "" if captions else f"has no caption: {where} has no {' or '.join(columns)}")


def _labelled(path: Path, rows: list[Row], kept: Sequence[str]) -> Labelled:
    if not any(row.label for row in rows):
        return Labelled([(row.image, 0) for row in rows], ())
    found = labels_of([row.label for row in rows], str(path), lambda row: f"{path}: line {rows[row].line}", kept=kept)
    return Labelled([(row.image, n) for row, n in zip(rows, found.numbers.tolist())], found.classes, notes=found.notes)


def is_index(path: Path) -> bool:
    """Return whether a file begins like an index."""
    try:
        check_file(path)
        with open(path, encoding="utf-8-sig", newline="") as file:
            return set(COLUMNS) <= {name.strip() for name in file.readline(1000).split(",")}
    except (UnusableFile, OSError, ValueError):
        return False


def _text_of(path: Path) -> str:
    try:
        content = read_bytes(path)
    except UnusableFile as problem:
        cure = "name a CSV file with the columns image_path,label"
        raise DataError(f"dataset_param.index = {path}", str(problem), cure) from None
    try:
        text = content.decode("utf-8-sig")  # Excel begins a file with a byte order mark
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise DataError(
            f"{path}: line {line}", f"is not UTF-8: byte 0x{content[error.start]:02x}", "save the file as UTF-8"
        ) from None
    if "\0" in text:
        line = text[: text.index("\0")].count("\n") + 1
        raise DataError(f"{path}: line {line}", "holds a NUL byte: this is no text", "save the file as UTF-8")
    return text


def _csv_rows(path: Path, text: str, labelled: bool, captions: tuple[str, ...]) -> Iterator[Row]:
    reader = csv.DictReader(io.StringIO(text, newline=""), skipinitialspace=True, strict=True)
    try:
        found = list(reader.fieldnames or ())
        image = next((name for name in IMAGE_NAMES if name in found), IMAGE) if captions else IMAGE
        required = (image, LABEL) if labelled else (image,)
        _check_columns(path, found, (*required, *captions))
        for row in reader:
            yield _row(f"{path}: line {reader.line_num}", reader.line_num, row, required, captions)
    except csv.Error as error:
        raise DataError(
            f"{path}: line {reader.line_num}", f"is no CSV: {error}", "close every quote, or write the file again"
        ) from None


def _check_columns(path: Path, found: list[str], wanted: tuple[str, ...]) -> None:
    counts = Counter(found)
    if all(counts[column] == 1 for column in wanted):
        return
    cure = f"its first line must name {','.join(wanted)}, each once"
    for delimiter, words in _DELIMITERS.items():
        if any(delimiter in name for name in found):
            cure = f"its columns are separated by {words}: save it with commas"
    raise DataError(str(path), f"has the columns {reprlib.repr(found)}", cure)


def _row(
    where: str, line: int, row: dict[str | None, str | list[str] | None], required: tuple[str, ...],
    captions: tuple[str, ...],
) -> Row:  # fmt: skip
    surplus = [field for field in row.get(None) or () if field]
    if surplus:
        shown = ", ".join(surplus)[:80]
        what = "path or caption" if captions else "path"
        raise DataError(where, f"has more fields than the first line: {shown}", f"quote a {what} that holds a comma")
    image, label = (*(str(row[column] or "") for column in required), "")[:2]
    for column, value in zip(required, (image, label)):
        if not value.strip():
            raise DataError(where, f"has no {column}", f"write {','.join(required)} in every line")
        if "\n" in value or "\r" in value:
            raise DataError(where, f"column {column} spans several lines", "close the quote that is open there")
    texts = tuple(str(row[column]) for column in captions if str(row[column] or "").strip())
    return Row(line, _below(where, image), composed([label.strip()])[0], texts)


def _below(where: str, image: str) -> str:
    """Return the normalized path; raise DataError if it leaves the folder of the images."""
    short = posixpath.normpath(image)
    if short.startswith(("/", "../")) or short in ("..", "."):
        raise DataError(
            f"{where}: {image}",
            "leaves dataset_param.data_folder",
            "paths start there: name one of a file inside it, or set data_folder to the folder of all images",
        )
    return short


def _check_one_label_each(path: Path, rows: list[Row]) -> None:
    first: dict[str, Row] = {}
    for row in rows:
        earlier = first.setdefault(row.image, row)
        if earlier.label != row.label:
            raise DataError(
                f"{path}: line {row.line}: {row.image}",
                f"has the label {reprlib.repr(row.label)}, and in line {earlier.line} {reprlib.repr(earlier.label)}",
                "keep one of the two lines: an image has one class",
            )
