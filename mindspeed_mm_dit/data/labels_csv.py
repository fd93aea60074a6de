"""Reads the index of a data folder: a CSV with the columns image_path,label, one line per image.

In a .jsonl each line is a JSON object instead, with the columns as keys. An index of captions has the columns that
data.json names, and may lack labels. Its image column may also be called file_name, as on the hub, or file or image. An
image may have several lines, each with a caption.
"""

from __future__ import annotations

import csv
import io
import json
import posixpath
import reprlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from mindspeed_mm_dit.configs.files import UnusableFile, check_file, lines_of, read_bytes
from mindspeed_mm_dit.data.captions import ImageCaptions, texts_of
from mindspeed_mm_dit.data.labels import composed, labels_of
from mindspeed_mm_dit.errors import DataError

IMAGE, LABEL = "image_path", "label"
COLUMNS = (IMAGE, LABEL)
IMAGE_NAMES = (IMAGE, "file_name", "file", "image")
"""Possible names of the image column in an index of captions."""

JSONL = ".jsonl"
MOST_OF_A_LINE = 1 << 20
_DELIMITERS = {";": "semicolons", "\t": "tabs", "|": "bars"}


class Row(NamedTuple):
    """A line of an index."""

    line: int
    image: str
    """Normalized path, relative to the folder of the images."""
    label: str
    """A number or a name, in Unicode's composed form; "" if labels are not requested."""
    captions: tuple[str, ...] = ()


class Listing(NamedTuple):
    """Images and their classes, in the order of the index."""

    rows: list[tuple[str, int]]
    """(path below data_folder, label)."""
    classes: tuple[str, ...]
    """Name of every label; empty if the labels are plain numbers."""
    notes: tuple[str, ...] = ()
    """Lines for the user that begin with "note: " or "warning: "."""
    captions: Sequence[ImageCaptions] = ()
    """Captions of each image; empty if captions are not requested."""


def read_labels(
    path: Path, labelled: bool = True, captions: tuple[str, ...] = (), known_classes: Sequence[str] = ()
) -> Listing:
    """Read an index; labels that are not numbers are class names, numbered in sorted order.

    labelled: whether labels are requested; if not, all are 0. captions: names of the caption columns. known_classes:
    class names of a run or cache to continue.

    Raises:
        DataError: naming file, line and cure.
    """
    rows = list(_rows_in(path, _text_of(path), labelled, captions))
    _check_labels_agree(path, rows)
    if not captions:
        return _labelled(path, rows, known_classes)
    by_image: dict[str, list[Row]] = {}
    for row in rows:
        by_image.setdefault(row.image, []).append(row)
    image_captions = tuple(_captions_of(path, lines, captions) for lines in by_image.values())
    listing = _labelled(path, [lines[0] for lines in by_image.values()], known_classes)
    return listing._replace(captions=image_captions)


def _captions_of(path: Path, rows: list[Row], columns: tuple[str, ...]) -> ImageCaptions:
    captions = tuple(caption for row in rows for caption in row.captions)
    where = f"{path.name}, line {rows[0].line}"
    return ImageCaptions(captions, "" if captions else f"has no caption: {where} has no {' or '.join(columns)}")


def _labelled(path: Path, rows: list[Row], known_classes: Sequence[str]) -> Listing:
    if not any(row.label for row in rows):
        return Listing([(row.image, 0) for row in rows], ())
    labels = labels_of(
        [row.label for row in rows],
        str(path),
        lambda row: f"{path}: line {rows[row].line}",
        known_classes=known_classes,
    )
    return Listing([(row.image, n) for row, n in zip(rows, labels.numbers.tolist())], labels.classes, labels.notes)


def is_index(path: Path) -> bool:
    """Return whether a file begins like an index."""
    return set(COLUMNS) <= set(columns_of(path))


def columns_of(path: Path) -> list[str]:
    """Return the columns that the first line of a CSV or .jsonl names; none if it is not such a file."""
    with suppress(UnusableFile, OSError, ValueError, RecursionError, csv.Error):
        check_file(path)
        with open(path, encoding="utf-8-sig", newline="") as file:
            line = file.readline(MOST_OF_A_LINE)
        if path.suffix.lower() == JSONL:
            return list(_object(line))
        return [name.strip() for name in next(csv.reader([line], skipinitialspace=True), [])]
    return []


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
        raise DataError(f"{path}: line {line}", "holds a NUL byte, so it is not text", "save the file as UTF-8")
    return text


def _rows_in(path: Path, text: str, labelled: bool, captions: tuple[str, ...]) -> Iterator[Row]:
    columns, records = (_jsonl if path.suffix.lower() == JSONL else _csv)(path, text)
    image = next((name for name in IMAGE_NAMES if name in columns), IMAGE) if captions else IMAGE
    required = (image, LABEL) if labelled else (image,)
    _check_columns(path, columns, (*required, *captions))
    for line, record in records:
        yield _row(f"{path}: line {line}", line, record, required, captions)


def _csv(path: Path, text: str) -> tuple[list[str], Iterator[tuple[int, Mapping[Any, Any]]]]:
    """Return the columns of a CSV, and its lines with their numbers."""
    reader = csv.DictReader(io.StringIO(text, newline=""), skipinitialspace=True, strict=True)

    def lines() -> Iterator[tuple[int, Mapping[Any, Any]]]:
        try:
            for row in reader:
                yield reader.line_num, row
        except csv.Error as error:
            raise _csv_error(path, reader.line_num, error) from None

    try:
        return list(reader.fieldnames or ()), lines()
    except csv.Error as error:
        raise _csv_error(path, reader.line_num, error) from None


def _csv_error(path: Path, line: int, error: csv.Error) -> DataError:
    return DataError(f"{path}: line {line}", f"is not valid CSV: {error}", "close every quote, or write the file again")


def _jsonl(path: Path, text: str) -> tuple[list[str], Iterator[tuple[int, Mapping[Any, Any]]]]:
    """Return the keys of all objects of a .jsonl, and its lines with their numbers."""
    records = []
    for number, line in enumerate(lines_of(text), 1):
        try:
            records += [(number, _object(line))] if line.strip() else []
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{path}: line {number}", f"is not a JSON object: {error}", "write one object in each line"
            ) from None
    return list({key: None for _, record in records for key in record}), iter(records)


def _object(line: str) -> dict[str, Any]:
    """Return a JSON object, numbers as texts; raises ValueError for anything else."""
    record = json.loads(line, parse_int=str, parse_float=str)
    if not isinstance(record, dict) or "\\u0000" in (text := json.dumps(record, ensure_ascii=False)):
        raise ValueError(reprlib.repr(record))
    text.encode()  # (JSON can contain half a surrogate pair: UnicodeEncodeError is a ValueError)
    return record


def _check_columns(path: Path, columns: list[str], required: tuple[str, ...]) -> None:
    counts = Counter(columns)
    if all(counts[column] == 1 for column in required):
        return
    cure = f"its first line must name {','.join(required)}, each once"
    for delimiter, words in _DELIMITERS.items():
        if any(delimiter in name for name in columns):
            cure = f"its columns are separated by {words}: save it with commas"
    raise DataError(str(path), f"has the columns {reprlib.repr(columns)}", cure)


def _row(where: str, line: int, row: Mapping[Any, Any], required: tuple[str, ...], captions: tuple[str, ...]) -> Row:
    surplus = [field for field in row.get(None) or () if field]
    if surplus:
        extra = ", ".join(surplus)[:80]
        what = "path or caption" if captions else "path"
        raise DataError(where, f"has more fields than the first line: {extra}", f"quote a {what} that holds a comma")
    image, label = (*(str(row.get(column) or "") for column in required), "")[:2]
    for column, value in zip(required, (image, label)):
        if not value.strip():
            raise DataError(where, f"has no {column}", f"write {','.join(required)} in every line")
        if "\n" in value or "\r" in value:
            raise DataError(where, f"column {column} spans several lines", "close the quote that is open there")
    all_texts = [text for column in captions for text in texts_of(row.get(column)) or ()]
    texts = tuple(text for text in all_texts if text.strip())
    return Row(line, _inside_folder(where, image), composed([label.strip()])[0], texts)


def _inside_folder(where: str, image: str) -> str:
    """Return the normalized path; raise DataError if it leaves the folder of the images."""
    short = posixpath.normpath(image)
    if short.startswith(("/", "../")) or short in ("..", "."):
        raise DataError(
            f"{where}: {image}",
            "leaves dataset_param.data_folder",
            "paths are relative to it: name a file inside it, or set data_folder to the folder of all images",
        )
    return short


def _check_labels_agree(path: Path, rows: list[Row]) -> None:
    first: dict[str, Row] = {}
    for row in rows:
        earlier = first.setdefault(row.image, row)
        if earlier.label != row.label:
            raise DataError(
                f"{path}: line {row.line}: {row.image}",
                f"has the label {reprlib.repr(row.label)}, and in line {earlier.line} {reprlib.repr(earlier.label)}",
                "keep one of the two lines: an image has one class",
            )
