"""Tables of samples with the line of each entry: the index of an image folder, and the annotation of clips.

An index is a CSV with the columns image_path,label and a line per image, or a .jsonl with these keys. An index of
captions has the columns that data.json names, and may lack labels; its image column may also be called file_name, as on
the hub, or file or image. An image may have several lines, each with a caption.

An annotation has MindSpeed-MM's format, one JSON list, or one JSON object per line:

    {"path": "videos/1.mp4", "cap": "A dog runs.", "num_frames": 81, "fps": 24, "resolution": {"height": 480, ...}}

``cap`` may be a list, one of which is chosen at random each time. The resolution may be a pair [height, width].
num_frames, fps and resolution are optional: the video file has them too. No image or video is opened here.
"""

from __future__ import annotations

import csv
import io
import json
import posixpath
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from mindspeed_mm_dit.configs.files import UnusableFile, check_file, error_text, lines_of, read_bytes
from mindspeed_mm_dit.configs.limits import shorten_repr
from mindspeed_mm_dit.data.captions import ImageCaptions, as_text_list
from mindspeed_mm_dit.data.labels import ANY_CLASSES, normalize_names, parse_labels
from mindspeed_mm_dit.errors import DataError

IMAGE, LABEL = "image_path", "label"
IMAGE_NAMES = (IMAGE, "file_name", "file", "image")
"""Possible names of the image column in an index of captions."""

JSONL = ".jsonl"
MAX_LINE_LETTERS = 1 << 20
_DELIMITERS = {";": "semicolons", "\t": "tabs", "|": "bars"}
_SPACE = re.compile(r"[ \t\r\n]*")
_PAIR_IN_BRACES = re.compile(r"\{\s*\d+\s*,\s*\d+\s*\}")
Entry = tuple[int, Any]
"""Line, from 1, and content."""


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


def read_table(
    path: Path, labelled: bool = True, captions: tuple[str, ...] = (), known_classes: Sequence[str] = ()
) -> Listing:
    """Read an index; labels that are not numbers are class names, numbered in sorted order.

    labelled: whether labels are requested; if not, all are 0. captions: names of the caption columns. known_classes:
    class names of a run or cache to continue.

    Raises:
        DataError: naming file and line.
    """
    text = read_text(path, "dataset_param.index", "Name a CSV file with the columns image_path,label.")
    if "\0" in text:
        line = text[: text.index("\0")].count("\n") + 1
        raise DataError(f"{path}: line {line} holds a NUL byte, so it is not text. Save the file as UTF-8.")
    rows = list(_rows_in(path, text, labelled, captions))
    _check_labels_agree(path, rows)
    by_image: dict[str, list[Row]] = {}
    for row in rows:
        by_image.setdefault(row.image, []).append(row)
    image_captions = [_captions_of(path, lines, captions) for lines in by_image.values()] if captions else []
    rows = [lines[0] for lines in by_image.values()] if captions else rows
    if not any(row.label for row in rows):
        return Listing([(row.image, 0) for row in rows], (), captions=image_captions)
    words, location = [row.label for row in rows], lambda number: f"{path}: line {rows[number].line}"
    labels = parse_labels(words, str(path), location, known_classes=known_classes)
    numbered = list(zip((row.image for row in rows), labels.numbers.tolist()))
    return Listing(numbered, labels.classes, labels.notes, image_captions)


def _captions_of(path: Path, rows: list[Row], columns: tuple[str, ...]) -> ImageCaptions:
    captions = tuple(caption for row in rows for caption in row.captions)
    where = f"{path.name}, line {rows[0].line}"
    return ImageCaptions(captions, "" if captions else f"has no caption: {where} has no {' or '.join(columns)}")


def _rows_in(path: Path, text: str, labelled: bool, captions: tuple[str, ...]) -> Iterator[Row]:
    if path.suffix.lower() == JSONL:
        entries = list(json_lines(path, text, _record))
        columns, records = list({key: None for _, record in entries for key in record}), iter(entries)
    else:
        columns, records = csv_lines(path, text)
    image = next((name for name in IMAGE_NAMES if name in columns), IMAGE) if captions else IMAGE
    required = (image, LABEL) if labelled else (image,)
    _check_columns(path, columns, (*required, *captions))
    for line, record in records:
        yield _row(f"{path}: line {line}", line, record, required, captions)


def _check_columns(path: Path, columns: list[str], required: tuple[str, ...]) -> None:
    counts = Counter(columns)
    if all(counts[column] == 1 for column in required):
        return
    for delimiter, words in _DELIMITERS.items():
        if any(delimiter in name for name in columns):
            raise DataError(f"{path} has columns separated by {words}: {reprlib.repr(columns)}. Save it with commas.")
    raise DataError(
        f"{path} has the columns {reprlib.repr(columns)}. Its first line must name {','.join(required)}, each once."
    )


def _row(where: str, line: int, row: Mapping[Any, Any], required: tuple[str, ...], captions: tuple[str, ...]) -> Row:
    surplus = [field for field in row.get(None) or () if field]
    if surplus:
        raise DataError(
            f"{where} has more fields than the first line: {', '.join(surplus)[:80]}. Quote a "
            f"{'path or caption' if captions else 'path'} that holds a comma."
        )
    image, label = (*(str(row.get(column) or "") for column in required), "")[:2]
    for column, value in zip(required, (image, label)):
        if not value.strip():
            raise DataError(f"{where} has no {column}. Write {','.join(required)} in every line.")
        if "\n" in value or "\r" in value:
            raise DataError(f"{where} has a {column} of several lines. Close the quote that is open there.")
    texts = tuple(text for column in captions for text in as_text_list(row.get(column)) or () if text.strip())
    if (path := path_inside(image)) is None:
        raise DataError(
            f"{where} names {image}, which leaves dataset_param.data_folder, where paths begin. Name a file inside it, "
            "or set data_folder to the folder of all images."
        )
    return Row(line, path, normalize_names([label.strip()])[0], texts)


def path_inside(path: str) -> str | None:
    """Return the normalized path; None if it leaves the folder that it is relative to."""
    short = posixpath.normpath(path)
    return None if short.startswith(("/", "../")) or short in ("..", ".") else short


def _check_labels_agree(path: Path, rows: list[Row]) -> None:
    first: dict[str, Row] = {}
    for row in rows:
        earlier = first.setdefault(row.image, row)
        if earlier.label != row.label:
            raise DataError(
                f"{path}: line {row.line} gives {row.image} the label {reprlib.repr(row.label)}, and line "
                f"{earlier.line} {reprlib.repr(earlier.label)}. Keep one of the two lines, as an image has one class."
            )


def is_index(path: Path) -> bool:
    """Return whether a file begins like an index."""
    return {IMAGE, LABEL} <= set(read_columns(path))


def read_columns(path: Path) -> list[str]:
    """Return the columns that the first line of a CSV or .jsonl names; none if it is not such a file."""
    with suppress(UnusableFile, OSError, ValueError, RecursionError, csv.Error):
        check_file(path)
        with open(path, encoding="utf-8-sig", newline="") as file:
            line = file.readline(MAX_LINE_LETTERS)
        if path.suffix.lower() == JSONL:
            return list(_record(line))
        return [name.strip() for name in next(csv.reader([line], skipinitialspace=True), [])]
    return []


def read_text(path: Path, setting: str, advice: str) -> str:
    """Return the text of a file that ``setting`` names; raises DataError, with the line if it is not UTF-8."""
    try:
        return read_bytes(path).decode("utf-8-sig")  # Excel begins a file with a byte order mark
    except UnusableFile as problem:
        raise DataError(f"{setting} = {path} {problem}. {advice}") from None
    except UnicodeDecodeError as error:
        line, byte = error.object[: error.start].count(b"\n") + 1, error.object[error.start]
        raise DataError(f"{path}: line {line} is not UTF-8 (byte {byte:#04x}). Save the file as UTF-8.") from None


def csv_lines(path: Path, text: str) -> tuple[list[str], Iterator[Entry]]:
    """Return the columns of a CSV, and its lines as objects."""

    def lines() -> Iterator[Entry]:
        reader = csv.DictReader(io.StringIO(text, newline=""), skipinitialspace=True, strict=True)
        try:
            yield 1, reader.fieldnames  # (the first line may be damaged, too)
            for row in reader:
                yield reader.line_num, row
        except csv.Error as error:
            raise DataError(
                f"{path}: line {reader.line_num} is not valid CSV: {error}. Close every quote, or write the file again."
            ) from None

    entries = lines()
    return list(next(entries)[1] or ()), entries


def json_lines(path: Path, text: str, parse: Callable[[str], Any] | None = None) -> Iterator[Entry]:
    """Yield the value of each line that is not empty; raises DataError with file and line if it is not JSON."""
    for number, line in enumerate(lines_of(text), 1):
        if line.strip():
            try:
                yield number, parse(line) if parse else json.loads(line, object_pairs_hook=_object)
            except (ValueError, RecursionError) as error:
                raise _not_json(
                    path, number, error, line, "Write one object in each line, as json.dump does."
                ) from None


def json_list(path: Path, text: str) -> Iterator[Entry]:
    """Yield each value of a JSON list with the line where it begins; raises DataError with file and line."""
    decoder, line, counted = json.JSONDecoder(object_pairs_hook=_object), 1, 0
    advice = "Write a list of objects, as json.dump does, or one object a line into a .jsonl."
    opening, at = "[", _after_space(text, 0)
    try:
        while text[at : at + 1] == opening:
            at = _after_space(text, at + 1)
            if opening == "[" and text[at : at + 1] == "]":
                break
            line, counted = line + text.count("\n", counted, at), at
            content, at = decoder.raw_decode(text, at)
            yield line, content
            opening, at = ",", _after_space(text, at)
        if at and text[at : at + 1] == "]":
            at = _after_space(text, at + 1)
            opening = "the end of the file, after the list,"
        if at < len(text) or opening in "[,":
            raise json.JSONDecodeError(f"Expecting {opening}", text, at)
    except json.JSONDecodeError as error:
        raise _not_json(path, error.lineno, error, text[max(0, error.pos - 40) :][:120], advice) from None
    except (ValueError, RecursionError) as error:
        raise _not_json(path, line, error, "", advice) from None


def _after_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None, "the pattern also matches the empty string"
    return match.end()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; raises ValueError if a key occurs twice."""
    content = dict(pairs)
    if len(content) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {shorten_repr(twice)} occurs twice in one object")
    return content


def _record(line: str) -> dict[str, Any]:
    """Return a JSON object, numbers as texts; raises ValueError for anything else, and for what is no text."""
    record = json.loads(line, parse_int=str, parse_float=str)
    if not isinstance(record, dict) or "\\u0000" in (text := json.dumps(record, ensure_ascii=False)):
        raise ValueError(f"it is not an object of texts, but {reprlib.repr(record)}")
    text.encode()  # (JSON can contain half a surrogate pair: UnicodeEncodeError is a ValueError)
    return record


def _not_json(path: Path, line: int, error: Exception, around: str, advice: str) -> DataError:
    if pair := _PAIR_IN_BRACES.search(around):
        return DataError(
            f"{path}: line {line} is not JSON: {pair[0]} is neither an object nor a list, although MindSpeed-MM's "
            'tutorial prints it so. Write "resolution": [480, 832], or {"height": 480, "width": 832}.'
        )
    problem = error.msg if isinstance(error, json.JSONDecodeError) else error_text(error)
    return DataError(f"{path}: line {line} is not JSON: {problem}. {advice}")


# --- an annotation of clips -------------------------------------------------------------------------------------------

KEYS = ("path", "cap", "num_frames", "fps", "resolution")
CUTTING_KEYS = ("cut", "crop")
"""Keys with which some MindSpeed-MM models select part of a video. Ignoring them would train on other clips."""


class UnusableEntry(Exception):
    """An entry that names no clip. The message continues after "line 7"."""


class ClipEntry(NamedTuple):
    """A clip as the annotation describes it."""

    line: int
    """Line of the annotation where the entry begins, from 1."""
    path: str
    """Normalized path of the video or image, relative to ``data_folder``."""
    captions: tuple[str, ...]
    """Captions of the clip; if there are several, one is chosen at random each time."""
    num_frames: int | None = None
    """Number of frames to use; later frames of the video are ignored."""
    fps: float | None = None
    """Frames per second."""
    size: tuple[int, int] | None = None
    """(H, W) of a frame, in pixels."""
    label: int | str | None = None
    """Class of the clip, if labels are requested."""


class AnnotationLine(NamedTuple):
    """An object of the annotation, not checked yet."""

    line: int
    content: Any


def read_annotation(path: Path) -> list[AnnotationLine]:
    """Return the objects of a .json or .jsonl file; raises DataError with file and line if it is not valid."""
    text = read_text(path, "dataset_param.json_path", "Correct the path, or write the annotation there.")
    entries = json_lines(path, text) if path.suffix == JSONL else json_list(path, text)
    lines = [AnnotationLine(*entry) for entry in entries]
    if not lines:
        raise DataError(f"dataset_param.json_path = {path} lists no clips. Write an object for each clip.")
    return lines


def parse_entry(line: AnnotationLine, captioned: bool = True, label_key: str | None = None) -> ClipEntry:
    """Parse an object of the annotation; raises UnusableEntry.

    captioned: whether captions are requested; label_key: key of the class, if labels are requested.
    """
    content = line.content
    if not isinstance(content, dict):
        raise UnusableEntry(f"is not an object with path and cap, but {shorten_repr(content)}")
    for key in CUTTING_KEYS:
        if content.get(key) is not None:
            raise UnusableEntry(f"has the key {key}, which selects part of a video: drop it, and cut the file instead")
    path, captions = _path_of(content, "path"), _captions_of_clip(content) if captioned else ()
    num_frames, fps, label = content.get("num_frames"), content.get("fps"), content.get(label_key)
    if num_frames is not None and (type(num_frames) is not int or num_frames < 1):
        raise UnusableEntry(f"has num_frames = {shorten_repr(num_frames)}, which is not a positive whole number")
    if fps is not None and (type(fps) not in (int, float) or not 0 < fps < 1e6):
        raise UnusableEntry(f"has fps = {shorten_repr(fps)}, which is not a positive number")
    size = _size_of(content.get("resolution"))
    is_name, is_number = isinstance(label, str) and label.strip(), type(label) is int and 0 <= label < ANY_CLASSES
    if label_key is not None and not is_name and not is_number:
        raise UnusableEntry(f"has {label_key} = {shorten_repr(label)}: a label is a number from 0 on, or a name")
    return ClipEntry(line.line, path, captions, num_frames, fps, size, label)


def image_paths(line: AnnotationLine, keys: Iterable[str]) -> tuple[str, ...]:
    """Return the normalized paths of the images that an object names under ``keys``; raises UnusableEntry."""
    return tuple(_path_of(line.content, key) for key in keys)


def _path_of(content: dict[str, Any], key: str) -> str:
    path = content.get(key)
    if path in (None, ""):
        raise UnusableEntry(f"has no {key}")
    if not isinstance(path, str) or not path.strip():
        raise UnusableEntry(f"has {key} = {shorten_repr(path)}, which is not a path")
    if (short := path_inside(path)) is None:
        raise UnusableEntry(f"names {path}, which leaves dataset_param.data_folder")
    return short


def _captions_of_clip(content: dict[str, Any]) -> tuple[str, ...]:
    if "cap" not in content:
        raise UnusableEntry(f"has no caption (key cap); its keys are {shorten_repr(list(content))}")
    value = content["cap"]
    if value in (None, "", []):
        raise UnusableEntry("has no caption")
    captions = tuple(value) if isinstance(value, list) else (value,)
    if any(not isinstance(caption, str) or not caption.strip() for caption in captions):
        raise UnusableEntry(f"has the caption {shorten_repr(value)}, which is not a text")
    return captions


def _size_of(resolution: Any) -> tuple[int, int] | None:
    """Return (H, W) from an object {height, width} or a pair."""
    if resolution is None:
        return None
    pair = (resolution.get("height"), resolution.get("width")) if isinstance(resolution, dict) else resolution
    if not isinstance(pair, (list, tuple)) or len(pair) != 2 or any(type(n) is not int or n < 1 for n in pair):
        raise UnusableEntry(
            f"has the resolution {shorten_repr(resolution)}: write [height, width], or an object with height and width"
        )
    return pair[0], pair[1]
