"""Reads images from Parquet files in the Hugging Face hub's format: image {bytes, path}, label and captions."""

from __future__ import annotations

import json
import threading
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.files import UnusableFile, check_file, check_unfolded, reason_of
from mindspeed_mm_dit.data.image_captions import ImageCaptions, merge_captions, parse_captions
from mindspeed_mm_dit.data.labels import composed
from mindspeed_mm_dit.data.shard_scan import Scanned, ShardQuery
from mindspeed_mm_dit.errors import DataError, PlatformError, UserError, nearest

IMAGE_COLUMNS = ("image", "img")
CACHE_BYTES = 256 * 2**20
"""Row groups of up to this many bytes in all stay in memory; a row is only ever read with its whole group."""
OPEN_FILES = 16
"""Files that a thread keeps open."""


def scan_parquet(path: Path, query: ShardQuery) -> Scanned:
    """Return labels, captions and positions (row group, row in it) of the rows of a file. No image is read.

    Raises:
        DataError: it is not a Parquet file, or lacks a column, or a row has no label.
    """
    try:
        return _scan(path, query)
    except UserError:
        raise
    except UnusableFile as problem:
        raise DataError(str(path), str(problem), "fetch it again, or write it with smaller row groups") from None
    except Exception as error:  # (pyarrow can raise anything on damaged pages and headers)
        reason = " ".join(reason_of(error).split())
        raise DataError(str(path), f"is not a complete Parquet file: {reason}", "fetch it again") from None


def _scan(path: Path, query: ShardQuery) -> Scanned:
    parquet = _open(path)
    _image_column(path, parquet.schema_arrow)
    labels, names = _labels_in(path, parquet, query.label) if query.label else ([], ())
    groups = [parquet.metadata.row_group(group) for group in range(parquet.metadata.num_row_groups)]
    counts = [group.num_rows for group in groups]
    largest = max((group.total_byte_size for group in groups), default=0)
    check_unfolded(check_file(path), max(largest, 16 * sum(counts)))
    where = np.empty((sum(counts), 2), np.int64)
    where[:, 0] = np.repeat(np.arange(len(counts)), counts)
    where[:, 1] = np.concatenate([np.arange(count) for count in counts]) if counts else 0
    return Scanned(
        labels or [""] * len(where),
        where,
        names,
        read_bytes=largest,
        captions=_captions_in(path, parquet, query.captions),
    )


def _labels_in(path: Path, parquet: Any, name: str) -> tuple[list[str], tuple[str, ...]]:
    """Return the label of each row, by its name if the hub's features list names, and the names."""
    column = _column(path, parquet, name, "label_column")
    if column.null_count:
        row = column.is_null().to_numpy().argmax()
        raise DataError(f"{path}: row {row}", f"has no {name}", "write a label in every row")
    names, labels = _names_of(path, parquet.schema_arrow, name), column.to_pylist()
    if all(type(label) is int for label in labels):
        return [names[label] if 0 <= label < len(names) else str(label) for label in labels], names
    if all(isinstance(label, str) for label in labels):
        return [label.strip() for label in labels], names
    raise DataError(f"{path}: column {name}", f"holds {column.type}", "labels are whole numbers, or names")


def _captions_in(path: Path, parquet: Any, names: tuple[str, ...]) -> list[ImageCaptions]:
    """Return the captions of each row from the columns ``names``, of texts or lists of texts."""
    columns = [_column(path, parquet, name, "captions").to_pylist() for name in names]
    return [
        merge_captions([parse_captions(value, name) for name, value in zip(names, values)], names)
        for values in zip(*columns)
    ]


def _column(path: Path, parquet: Any, name: str, setting: str) -> Any:
    known = parquet.schema_arrow.names
    if name not in known:
        cure = nearest(name, known) + f"set dataset_param.{setting} to one of {', '.join(known)}"
        raise DataError(f"{path}: column {name}", "is not there", cure)
    column = parquet.read(columns=[name]).column(0)
    check_unfolded(check_file(path), sum(_text_bytes(chunk) for chunk in column.chunks))
    return column


def _text_bytes(chunk: Any) -> int:
    """Return the bytes of all texts of a chunk, which stores each distinct text once until it is read."""
    from pyarrow import compute, types

    if not types.is_dictionary(chunk.type):
        return 0
    return int(compute.sum(compute.binary_length(chunk.dictionary).take(chunk.indices)).as_py() or 0)


def columns_of_texts(path: Path) -> list[str]:
    """Return the columns of texts or of lists of texts."""
    from pyarrow import types

    def is_text(kind: Any) -> bool:
        nested = types.is_list(kind) or types.is_large_list(kind) or types.is_dictionary(kind)
        return is_text(kind.value_type) if nested else types.is_string(kind) or types.is_large_string(kind)

    return [field.name for field in _open(path).schema_arrow if is_text(field.type)]


class ParquetReader:
    """Reads images by their position; safe to call from several threads, each with its own open files."""

    def __init__(self) -> None:
        self._of_thread = threading.local()
        self._groups: OrderedDict[tuple[Path, int], Any] = OrderedDict()
        self._cached_bytes = 0
        self._changes = threading.Lock()

    def read(self, path: Path, group: int, row: int) -> bytes:
        """Return the image file in a row; raises UnusableFile."""
        try:
            image = self._group(path, group)[row].as_py()
        except (OSError, ValueError, IndexError) as error:  # pyarrow's errors are of these
            raise UnusableFile(f"cannot be read: {reason_of(error)}") from None
        if not image:
            raise UnusableFile("holds no bytes of an image")
        return bytes(image)

    def _group(self, path: Path, group: int) -> Any:
        with self._changes:
            if (path, group) in self._groups:
                self._groups.move_to_end((path, group))
                return self._groups[path, group]
        column = self._read_group(path, group)
        with self._changes:
            if (path, group) not in self._groups:  # (another thread may have read it meanwhile)
                self._groups[path, group] = column
                self._cached_bytes += column.nbytes
            while len(self._groups) > 1 and self._cached_bytes > CACHE_BYTES:
                self._cached_bytes -= self._groups.popitem(last=False)[1].nbytes
        return column

    def _read_group(self, path: Path, group: int) -> Any:
        check_file(path)
        files: OrderedDict[Path, Any] = self._of_thread.__dict__.setdefault("files", OrderedDict())
        if path not in files:
            files[path] = _open(path)
        files.move_to_end(path)
        if len(files) > OPEN_FILES:
            files.popitem(last=False)
        parquet = files[path]
        name = _image_column(path, parquet.schema_arrow)
        column = parquet.read_row_group(group, columns=[name]).column(0).combine_chunks()
        return column.field("bytes") if hasattr(column.type, "num_fields") and column.type.num_fields else column


def _open(path: Path) -> Any:
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise PlatformError(
            "dataset_param.dataset_type = 'parquet'",
            "pyarrow is not installed",
            "pip install pyarrow (extra [parquet])",
        ) from None
    try:
        file = ParquetFile(path)
        leaves = [file.schema.column(number) for number in range(len(file.schema))]
        texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY" and ".list." not in leaf.path]
        return ParquetFile(path, metadata=file.metadata, read_dictionary=texts)  # (repeated texts take no more memory)
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise DataError(str(path), f"is not a Parquet file: {reason_of(error)}", "fetch it again") from None


def _image_column(path: Path, schema: Any) -> str:
    for name in IMAGE_COLUMNS:
        if name in schema.names:
            _check_pictures(path, schema.field(name))
            return name
    raise DataError(str(path), f"has the columns {', '.join(schema.names)}", "rename the column of the images to image")


def _check_pictures(path: Path, column: Any) -> None:
    """Raise DataError unless the values of a column are the bytes of files, alone or with a path."""
    from pyarrow import types

    inner = [column.type.field(number) for number in range(column.type.num_fields)]
    kind = next((field.type for field in inner if field.name == "bytes"), column.type)
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind)):
        cure = "write the files themselves: bytes, or {bytes, path} as the Hugging Face hub does"
        raise DataError(f"{path}: column {column.name}", f"holds {column.type}, which are not images", cure)


def _names_of(path: Path, schema: Any, label_column: str) -> tuple[str, ...]:
    """Return the class names from the hub's features, in the order of their numbers; empty if there are none."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        names = features[label_column]["names"]
        listed = names if isinstance(names, list) else [names[str(number)] for number in range(len(names))]
    except (KeyError, TypeError, ValueError):
        return ()
    class_names = composed(map(str, listed))
    if twice := next((name for name, count in Counter(class_names).items() if count > 1), None):
        raise DataError(
            f"{path}: column {label_column}", f"lists the class {twice!r} twice", "give each class another name"
        )
    return class_names
