"""A folder of shards, Parquet or tar, as one list of images that are read by number.

The list is made once, by scanning every shard, and stored next to them in INDEX with a fingerprint of names, sizes
and times. If a shard has changed, all are scanned again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from mindspeed_mm_dit.configs.files import UnusableFile, check_file, is_folder, not_a_folder_reason, replace_file
from mindspeed_mm_dit.configs.images import DatasetParam, ImageFiles
from mindspeed_mm_dit.data.captions import ImageCaptions
from mindspeed_mm_dit.data.labels import Labels, parse_labels
from mindspeed_mm_dit.data.shard_rows import ParquetReader, ShardContents, ShardQuery, TarReader, scan_parquet, scan_tar
from mindspeed_mm_dit.data.sources import left_out_note
from mindspeed_mm_dit.errors import DataError
from mindspeed_mm_dit.terminal import progress

INDEX = ".mm_dit_index.npz"
VERSION = 4
"""Version of INDEX; an index of another version is rebuilt."""

SLOW_SCAN_BYTES = 64 * 2**20
"""A run warns if more bytes than this are read for one image."""

_SPLIT = re.compile(r"(train|training|val|valid|validation|test)(?![a-z])")


class ShardImageReader(Protocol):
    """Reads the bytes of an image from its position in a shard; called from several threads."""

    def read(self, path: Path, first: int, second: int, /) -> bytes:
        """Return the image's file; raises UnusableFile."""


class ShardFormat(NamedTuple):
    """A file format of shards."""

    suffix: str
    scan: Callable[[Path, ShardQuery], ShardContents]
    reader: Callable[[], ShardImageReader]


KINDS: dict[ImageFiles, ShardFormat] = {
    "parquet": ShardFormat(".parquet", scan_parquet, ParquetReader),
    "webdataset": ShardFormat(".tar", scan_tar, TarReader),
}


class ShardRows(Sequence[str]):
    """Images in shards, and their names, e.g. "data/train-00000.parquet: row 17"."""

    def __init__(
        self, files: Sequence[Path], starts: np.ndarray, where: np.ndarray, rows: np.ndarray, reader: ShardImageReader
    ) -> None:
        self._files, self._starts, self._where, self._rows, self._reader = files, starts, where, rows, reader

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: Any) -> Any:
        file, row, _ = self._location(number)
        return f"{file}: row {row}"

    @property
    def files(self) -> tuple[str, ...]:
        """Paths of all shards."""
        return tuple(map(str, self._files))

    def content(self, number: int) -> bytes:
        """Return the file of an image; raises UnusableFile."""
        file, _, (first, second) = self._location(number)
        return self._reader.read(file, first, second)

    def subset(self, numbers: np.ndarray) -> ShardRows:
        """Return the images ``numbers``."""
        return ShardRows(self._files, self._starts, self._where, self._rows[numbers], self._reader)

    def _location(self, number: int) -> tuple[Path, int, tuple[int, int]]:
        row = int(self._rows[number])
        shard = int(np.searchsorted(self._starts, row, side="right")) - 1
        first, second = self._where[row].tolist()
        return self._files[shard], row - int(self._starts[shard]), (first, second)


class ShardListing(NamedTuple):
    """All images of a folder of shards."""

    rows: ShardRows
    labels: np.ndarray
    """(N,) int64."""
    classes: tuple[str, ...]
    """Name of each label; empty if they have none."""
    notes: tuple[str, ...]
    digest: str
    """Image count, and a digest of the shards' names and sizes, labels and captions."""
    captions: Sequence[ImageCaptions] = ()
    """Captions of each image; empty if captions are not requested."""


def list_shards(param: DatasetParam, labelled: bool = True, known_classes: Sequence[str] = ()) -> ShardListing:
    """Return the images that ``param`` names; the first call scans every shard.

    labelled: whether labels are requested; if not, all are 0. known_classes: class names of a run to continue.

    Raises:
        DataError: naming the folder, or the shard.
    """
    folder, form = Path(param.data_folder), KINDS[param.dataset_type]
    files = _files_of(folder, form, param)
    facts = [(str(file.relative_to(folder)), _size_of(file), os.stat(file).st_mtime_ns) for file in files]
    query = ShardQuery(param.label_column if labelled else None, param.caption_fields)
    fingerprint = json.dumps([VERSION, param.dataset_type, query.label, facts, *query.captions])
    index_path, notes = folder / (f".mm_dit_index-{param.split}.npz" if param.split else INDEX), list[str]()
    index = _read_index(index_path, fingerprint, notes)
    if index is None:
        index = _scan_shards(files, form, query)
        try:
            replace_file(index_path, lambda aside: _write_index(aside, fingerprint, index))
        except DataError:
            notes.append(f"note: {index_path} cannot be written: every run scans the shards again")
    facts_of_rows, where, starts = json.loads(index["facts"].tobytes()), index["where"], index["starts"]
    left_out = left_out_note(Counter(facts_of_rows["left_out"]))
    notes += left_out
    if facts_of_rows["read_bytes"] > SLOW_SCAN_BYTES:
        mebibytes = facts_of_rows["read_bytes"] / 2**20
        notes.append(
            f"warning: the largest row group has {mebibytes:,.0f} MiB, all of which is read for each image that is "
            "read at random: write the shards with row groups of some 100 images"
        )
    if not len(where):
        note = f" ({left_out[0].partition(': ')[2]})" if left_out else ""
        raise DataError(
            f"dataset_param.data_folder = {folder} has no "
            f"{'images with labels' if labelled else 'images'} in its shards{note}. Name a folder of other shards."
        )
    rows, labels = ShardRows(files, starts, where, np.arange(len(where)), form.reader()), Labels(index["labels"], ())
    if labelled:
        words, stated, numbers = facts_of_rows["words"], facts_of_rows["stated"], index["labels"]
        first_row = lambda word: rows[int((numbers == word).argmax())]  # noqa: E731
        labels = parse_labels(words, str(folder), first_row, stated, known_classes)
        labels = labels._replace(numbers=labels.numbers[numbers])
    captions, names = facts_of_rows["captions"], json.dumps([fact[:2] for fact in facts])
    content = names.encode() + labels.numbers.tobytes() + (json.dumps(captions).encode() if query.captions else b"")
    digest = f"{len(rows):,} images, {hashlib.sha256(content).hexdigest()[:12]}"
    image_captions = [ImageCaptions(tuple(texts), problem) for texts, problem in captions]
    return ShardListing(rows, labels.numbers, labels.classes, (*notes, *labels.notes), digest, image_captions)


def _files_of(folder: Path, form: ShardFormat, param: DatasetParam) -> list[Path]:
    what = f"dataset_param.data_folder = {folder}"
    if not is_folder(folder):
        raise DataError(f"{what} {not_a_folder_reason(folder)}. Correct the path in data.json.")
    chosen = shard_files(folder, param)
    if not chosen:
        begin = f" and begin with {param.split!r}" if param.split else ""
        raise DataError(
            f"{what} holds no files whose names end in {form.suffix}{begin}. Correct the path in data.json."
        )
    splits = sorted({match[1] for path in chosen if (match := _SPLIT.match(path.name))})
    if len(splits) > 1 and param.split is None:
        name = "train" if "train" in splits else splits[0]
        raise DataError(f'{what} holds the splits {", ".join(splits)}. Name one, such as "split": "{name}".')
    return chosen


def shard_files(folder: Path, param: DatasetParam) -> list[Path]:
    """Return the shards of ``param`` in ``folder``, sorted."""
    files = sorted(path for path in folder.rglob("[!.]*") if path.suffix.lower() == KINDS[param.dataset_type].suffix)
    return [path for path in files if path.name.startswith(param.split or "")]


def _size_of(file: Path) -> int:
    try:
        return check_file(file)
    except UnusableFile as problem:
        raise DataError(f"{file} {problem}. Fetch it again, or remove it.") from None


def _scan_shards(files: Sequence[Path], form: ShardFormat, query: ShardQuery) -> dict[str, np.ndarray]:
    """Return the arrays of INDEX: the position of each row, the number of its label's word, and facts as JSON."""
    shards = [form.scan(file, query) for file in progress("shards", files, total=len(files), unit="shard", delay=2)]
    counts = [len(scanned.labels) for scanned in shards]
    distinct = sorted({word for scanned in shards for word in scanned.labels})
    numbers = {word: number for number, word in enumerate(distinct)}
    facts = {
        "words": distinct,
        "stated": list(dict.fromkeys(name for scanned in shards for name in scanned.names)),
        "left_out": sum((Counter(scanned.left_out) for scanned in shards), Counter[str]()),
        "read_bytes": max(scanned.read_bytes for scanned in shards),
        "captions": [image for scanned in shards for image in scanned.captions],
    }
    return {
        "labels": np.array([numbers[word] for scanned in shards for word in scanned.labels], np.int64),
        "where": np.concatenate([scanned.where for scanned in shards]),
        "starts": np.cumsum([0, *counts[:-1]]),
        "facts": np.frombuffer(json.dumps(facts).encode(), np.uint8),
    }


def _read_index(path: Path, fingerprint: str, notes: list[str]) -> dict[str, np.ndarray] | None:
    """Return the index of exactly these shards, or None, and a note if it is damaged."""
    if not path.is_file():
        return None
    try:
        with np.load(path) as file:
            is_ours = str(file["fingerprint"]) == fingerprint
            return {name: file[name] for name in ("labels", "where", "starts", "facts")} if is_ours else None
    except Exception:  # (a damaged zip file or array can raise anything)
        notes.append(f"note: {path} is damaged, so the shards were scanned again")
        return None


def _write_index(path: Path, fingerprint: str, arrays: dict[str, np.ndarray]) -> None:
    with open(path, "wb") as file:
        np.savez(file, fingerprint=np.array(fingerprint), **arrays)
