"""The images of one shard: a Parquet file as on the Hugging Face hub, or a tar file in webdataset's layout.

Parquet: image {bytes, path}, label and captions. Tar: consecutive KEY.jpg and KEY.cls, whose text is the label;
captions are KEY.txt, one per line, or KEY.json, an object with texts. A key ends at the first dot of a file's name.
Files whose names begin with a dot, such as the companions that macOS writes, or have none belong to no sample.

Rows are read at random by their position in the file. Hugging Face's datasets would copy all files to a cache for that.
"""

from __future__ import annotations

import json
import os
import tarfile
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from mindspeed_mm_dit.configs.files import UnusableFile, check_file, check_unfolded, error_text
from mindspeed_mm_dit.configs.limits import shorten_repr
from mindspeed_mm_dit.data.captions import (
    ImageCaptions,
    check_size,
    file_endings,
    merge_captions,
    parse_caption_file,
    parse_captions,
)
from mindspeed_mm_dit.data.labels import normalize_names
from mindspeed_mm_dit.data.transforms import readable_formats
from mindspeed_mm_dit.errors import DataError, UserError, nearest, not_installed

IMAGE_COLUMNS = ("image", "img")
CACHE_BYTES = 256 * 2**20
"""Row groups of up to this many bytes in all stay in memory; a row is only ever read with its whole group."""
LABEL = ".cls"
MAX_LABEL_BYTES = 1000
READ_BYTES = 1 << 15
"""Buffer size: enough for several headers of small images, little compared with large images."""


class ShardQuery(NamedTuple):
    """What to read for each row besides its image."""

    label: str | None = "label"
    """Column of the labels, in Parquet; None if no labels are needed."""
    captions: tuple[str, ...] = ()
    """Columns of the captions, or endings of their files."""


class ShardContents(NamedTuple):
    """The rows of a shard."""

    labels: Sequence[str]
    """The class of each row as it is written, or its name if the shard numbers names; "" if labels are not needed."""
    where: np.ndarray
    """(n, 2) int64: position of each image in the shard, for its reader."""
    names: tuple[str, ...] = ()
    """Names of the labels in the order of their numbers, if the shard lists them."""
    left_out: Mapping[str, int] = MappingProxyType({})
    """Number of files that are left out, by kind."""
    read_bytes: int = 0
    """Largest number of bytes read for one random image, if more than the image itself; else 0."""
    captions: Sequence[ImageCaptions] = ()
    """Captions of each row; empty if captions are not needed."""


# --- Parquet ----------------------------------------------------------------------------------------------------------


def scan_parquet(path: Path, query: ShardQuery) -> ShardContents:
    """Return labels, captions and positions (row group, row in it) of the rows of a file. No image is read.

    Raises:
        DataError: it is not a Parquet file, or lacks a column, or a row has no label.
    """
    try:
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
        columns = [_column(path, parquet, name, "captions").to_pylist() for name in query.captions]
        texts = [f"text in column {name}" for name in query.captions]
        captions = [
            merge_captions([parse_captions(*pair) for pair in zip(values, query.captions)], texts)
            for values in zip(*columns)
        ]
        return ShardContents(labels or [""] * len(where), where, names, read_bytes=largest, captions=captions)
    except UserError:
        raise
    except UnusableFile as problem:
        raise DataError(f"{path} {problem}. Fetch it again, or write it with smaller row groups.") from None
    except Exception as error:  # (pyarrow can raise anything on damaged pages and headers)
        words = " ".join(error_text(error).split())
        raise DataError(f"{path} is not a complete Parquet file: {words}. Fetch it again.") from None


def _labels_in(path: Path, parquet: Any, name: str) -> tuple[list[str], tuple[str, ...]]:
    """Return the label of each row, by its name if the hub's features list names, and the names."""
    column = _column(path, parquet, name, "label_column")
    if column.null_count:
        row = column.is_null().to_numpy().argmax()
        raise DataError(f"Row {row} of {path} has no {name}. Write a label in every row.")
    names, labels = _names_of(path, parquet.schema_arrow, name), column.to_pylist()
    if all(type(label) is int for label in labels):
        return [names[label] if 0 <= label < len(names) else str(label) for label in labels], names
    if all(isinstance(label, str) for label in labels):
        return [label.strip() for label in labels], names
    raise DataError(f"Column {name} of {path} holds {column.type}, but labels are whole numbers, or names.")


def _names_of(path: Path, schema: Any, label_column: str) -> tuple[str, ...]:
    """Return the class names from the hub's features, in the order of their numbers; empty if there are none."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        names = features[label_column]["names"]
        listed = names if isinstance(names, list) else [names[str(number)] for number in range(len(names))]
    except (KeyError, TypeError, ValueError):
        return ()
    class_names = normalize_names(map(str, listed))
    if twice := next((name for name, count in Counter(class_names).items() if count > 1), None):
        raise DataError(f"{path} lists the class {twice!r} of column {label_column} twice. Give each another name.")
    return class_names


def _column(path: Path, parquet: Any, name: str, setting: str) -> Any:
    known = parquet.schema_arrow.names
    if name not in known:
        raise DataError(
            f"{path} has no column {name}. {nearest(name, known)}Set dataset_param.{setting} to one of "
            f"{', '.join(known)}."
        )
    column = parquet.read(columns=[name]).column(0)
    check_unfolded(check_file(path), sum(_text_bytes(chunk) for chunk in column.chunks))
    return column


def _text_bytes(chunk: Any) -> int:
    """Return the bytes of all texts of a chunk, which stores each distinct text once until it is read."""
    from pyarrow import compute, types

    if not types.is_dictionary(chunk.type):
        return 0
    return int(compute.sum(compute.binary_length(chunk.dictionary).take(chunk.indices)).as_py() or 0)


def text_columns(path: Path) -> list[str]:
    """Return the columns of texts or of lists of texts."""
    from pyarrow import types

    def is_text(kind: Any) -> bool:
        nested = types.is_list(kind) or types.is_large_list(kind) or types.is_dictionary(kind)
        return is_text(kind.value_type) if nested else types.is_string(kind) or types.is_large_string(kind)

    return [field.name for field in _open(path).schema_arrow if is_text(field.type)]


class ParquetReader:
    """Reads images by their position; safe to call from several threads."""

    def __init__(self) -> None:
        self._groups: OrderedDict[tuple[Path, int], Any] = OrderedDict()
        self._cached_bytes = 0
        self._changes = threading.Lock()

    def read(self, path: Path, group: int, row: int) -> bytes:
        """Return the image file in a row; raises UnusableFile."""
        try:
            image = self._group(path, group)[row].as_py()
        except (OSError, ValueError, IndexError) as error:  # pyarrow's errors are of these
            raise UnusableFile(f"cannot be read: {error_text(error)}") from None
        if not image:
            raise UnusableFile("holds no bytes of an image")
        return bytes(image)

    def _group(self, path: Path, group: int) -> Any:
        with self._changes:
            if (path, group) in self._groups:
                self._groups.move_to_end((path, group))
                return self._groups[path, group]
        _check_shard(path)
        parquet = _open(path)  # anew for each group, as an open one is not for several threads
        name = _image_column(path, parquet.schema_arrow)
        column = parquet.read_row_group(group, columns=[name]).column(0).combine_chunks()
        if hasattr(column.type, "num_fields") and column.type.num_fields:
            column = column.field("bytes")
        with self._changes:
            if (path, group) not in self._groups:  # (another thread may have read it meanwhile)
                self._groups[path, group] = column
                self._cached_bytes += column.nbytes
            while len(self._groups) > 1 and self._cached_bytes > CACHE_BYTES:
                self._cached_bytes -= self._groups.popitem(last=False)[1].nbytes
        return column


def _check_shard(path: Path) -> None:
    try:
        check_file(path)
    except UnusableFile as problem:
        raise UnusableFile(f"cannot be read, as its shard {problem}") from None


def _open(path: Path) -> Any:
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile, read_metadata
    except ImportError:
        raise not_installed("dataset_param.dataset_type = 'parquet'", "pyarrow", "parquet") from None
    try:
        metadata = read_metadata(path)
        leaves = [metadata.schema.column(number) for number in range(len(metadata.schema))]
        texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY" and ".list." not in leaf.path]
        return ParquetFile(path, metadata=metadata, read_dictionary=texts)  # (repeated texts take no more memory)
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise DataError(f"{path} is not a Parquet file: {error_text(error)}. Fetch it again.") from None


def _image_column(path: Path, schema: Any) -> str:
    """Return the column of the images; raises DataError unless it has the bytes of files, alone or with a path."""
    from pyarrow import types

    name = next((name for name in IMAGE_COLUMNS if name in schema.names), None)
    if name is None:
        raise DataError(
            f"{path} has no column {' or '.join(IMAGE_COLUMNS)}, but {', '.join(schema.names)}. Rename the column of "
            "the images to image."
        )
    column = schema.field(name)
    inner = [column.type.field(number) for number in range(column.type.num_fields)]
    kind = next((field.type for field in inner if field.name == "bytes"), column.type)
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind)):
        raise DataError(
            f"Column {column.name} of {path} holds {column.type}, which are not images. Write the bytes of the files, "
            "or {bytes, path} as the Hugging Face hub does."
        )
    return name


# --- tar --------------------------------------------------------------------------------------------------------------


def scan_tar(path: Path, query: ShardQuery) -> ShardContents:
    """Return labels, captions and positions (offset, bytes) of the samples of a file. No image is read.

    Raises:
        DataError: it is not a tar file, or is cut short; a label is not valid; or a sample has two files of one name.
    """
    labels: list[str] = []
    where: list[tuple[int, int]] = []
    captions: list[ImageCaptions] = []
    left_out: Counter[str] = Counter()
    needed = {LABEL} if query.label else set()
    used = needed | {ending.lower() for ending in file_endings(query.captions)}
    try:
        check_file(path)
        with open(path, "rb", READ_BYTES) as file:
            for sample in _samples(path, members(file), left_out):
                images = [ending for ending in sample if ending in readable_formats()]
                if not images or not needed <= set(sample):
                    left_out[" or a ".join(("file(s) of samples without an image", *needed))] += len(sample)
                    continue
                image = sample[images[0]]
                labels.append(_label(path, file, sample[LABEL]) if query.label else "")
                where.append((image.offset_data, image.size))
                captions += [_captions_of(file, image, sample, query.captions)] if query.captions else []
                left_out["image(s) after the first of a sample"] += len(images) - 1
                left_out.update(set(sample) - used - set(images))
    except UnusableFile as problem:
        raise DataError(f"{path} {problem}. Fetch it again.") from None
    except (tarfile.TarError, OSError, ValueError) as error:
        raise DataError(f"{path} is not a complete tar file: {error_text(error)}. Fetch it again.") from None
    return ShardContents(labels, np.array(where, np.int64).reshape(-1, 2), left_out=+left_out, captions=captions)


class TarReader:
    """Reads images by their position; safe to call from several threads."""

    def read(self, path: Path, offset: int, size: int) -> bytes:
        """Return the image file at this position; raises UnusableFile."""
        _check_shard(path)
        try:
            with open(path, "rb") as file:
                content = os.pread(file.fileno(), size, offset)
        except OSError as error:
            raise UnusableFile(f"cannot be read: {error_text(error)}") from None
        if len(content) < size:
            raise UnusableFile(f"is cut short: {path.name} ends within it")
        return content


def members(file: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """Yield the files of a tar file in order; the caller may seek in ``file`` in between.

    Raises:
        tarfile.TarError: it is not a tar file, is cut short, or lacks a header where one should be.
    """
    size = os.fstat(file.fileno()).st_size
    with tarfile.open(fileobj=file, mode="r:") as archive:
        while (member := archive.next()) is not None:
            archive.members = []  # type: ignore[attr-defined]  # (else tarfile keeps them all)
            if archive.offset > size:
                raise tarfile.ReadError(f"{member.name} goes on after its end")
            if member.isfile() and not member.issparse():
                yield member
        # tarfile takes whatever is no header for the end, which in a complete tar file is two blocks of zeros.
        file.seek(archive.offset)
        block = file.read(tarfile.BLOCKSIZE)
    if block.strip(b"\0"):
        raise tarfile.ReadError(f"there is no header at byte {archive.offset:,}")
    if not block:
        raise tarfile.ReadError("it ends without the empty blocks that close a tar file, so more may be missing")


def _samples(
    path: Path, files: Iterator[tarfile.TarInfo], left_out: Counter[str]
) -> Iterator[dict[str, tarfile.TarInfo]]:
    """Yield the files of each sample, by ending in small letters: consecutive files that share folder and key.

    ``left_out`` counts the files that belong to none.
    """
    sample: dict[str, tarfile.TarInfo] = {}
    current = None
    for member in files:
        folder, _, name = member.name.rpartition("/")
        key, dot, ending = name.partition(".")
        if not key or not dot:
            left_out["file(s) whose names begin with a dot" if dot else "file(s) without an ending"] += 1
            continue
        if (folder, key) != current and sample:
            yield sample
            sample = {}
        current, ending = (folder, key), (dot + ending).lower()
        if ending in sample:
            raise DataError(f"{path} holds {member.name} twice in one sample. Write the tar again with one of them.")
        sample[ending] = member
    if sample:
        yield sample


def _label(path: Path, file: BinaryIO, member: tarfile.TarInfo) -> str:
    file.seek(member.offset_data)
    content = file.read(min(member.size, MAX_LABEL_BYTES + 1))
    with suppress(UnicodeDecodeError):
        label = content.decode("utf-8-sig").strip()
        if len(content) <= MAX_LABEL_BYTES and label and not set(label) & set("\n\r\0"):
            return label
    raise DataError(
        f"{member.name} in {path} holds {shorten_repr(content)}, which is not a label. Write a number or a name, in "
        "one line."
    )


def _captions_of(
    file: BinaryIO, image: tarfile.TarInfo, sample: dict[str, tarfile.TarInfo], locations: tuple[str, ...]
) -> ImageCaptions:
    """Return the captions of a sample from its files at ``locations``."""
    parts = []
    for location in locations:
        member = sample.get(location.partition(":")[0].lower())
        if member is not None:
            try:
                check_size(member.size)
            except UnusableFile as problem:
                raise UnusableFile(f"holds {member.name}, which {problem}") from None
            file.seek(member.offset_data)
            parts.append(parse_caption_file(member.name, file.read(member.size), location))
    stem = image.name.rpartition("/")[2].partition(".")[0]
    return merge_captions(parts, [stem + location for location in locations])
