"""A folder of shards, Parquet or tar, as one list of images that are read by number.

The list is made once, by scanning every shard, and stored next to them in INDEX with a fingerprint of names, sizes
and times. If a shard has changed, all are scanned again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from mindspeed_mm_dit.configs.files import UnusableFile, check_file, is_folder, no_folder
from mindspeed_mm_dit.configs.images import DatasetParam, ImageFiles
from mindspeed_mm_dit.data import shard_rows
from mindspeed_mm_dit.data.captions import ImageCaptions
from mindspeed_mm_dit.data.labels import Labels, labels_of
from mindspeed_mm_dit.data.rows import note_of_left_out
from mindspeed_mm_dit.data.shard_rows import Scanned, ShardQuery
from mindspeed_mm_dit.errors import DataError
from mindspeed_mm_dit.terminal import progress

INDEX = ".mm_dit_index.npz"
VERSION = 3
"""Version of INDEX; an index of another version is rebuilt."""

INDEX_ARRAYS = ("words", "labels", "stated", "where", "starts", "left_out", "read_bytes", "told")
"""Arrays in INDEX, besides the fingerprint."""
MUCH_TO_READ = 64 * 2**20
"""A run warns if more bytes than this are read for one image."""

_SPLIT = re.compile(r"(train|training|val|valid|validation|test)(?![a-z])")


class ShardImageReader(Protocol):
    """Reads the bytes of an image from its position in a shard; called from several threads."""

    def read(self, path: Path, first: int, second: int, /) -> bytes:
        """Return the image's file; raises UnusableFile."""


class ShardFormat(NamedTuple):
    """A file format of shards."""

    suffix: str
    scan: Callable[[Path, ShardQuery], Scanned]
    reader: Callable[[], ShardImageReader]


KINDS: dict[ImageFiles, ShardFormat] = {
    "parquet": ShardFormat(".parquet", shard_rows.scan_parquet, shard_rows.ParquetReader),
    "webdataset": ShardFormat(".tar", shard_rows.scan_tar, shard_rows.TarReader),
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
    images: str
    """Fingerprint of the data set: image count, and a digest of the shards' names and sizes, labels and captions."""
    captions: Sequence[ImageCaptions] = ()
    """Captions of each image; empty if captions are not requested."""


def list_shards(param: DatasetParam, labelled: bool = True, known_classes: Sequence[str] = ()) -> ShardListing:
    """Return the images that ``param`` names; the first call scans every shard.

    labelled: whether labels are requested; if not, all are 0. known_classes: class names of a run to continue.

    Raises:
        DataError: naming the folder, or the shard.
    """
    folder, kind = Path(param.data_folder), KINDS[param.dataset_type]
    files = _files_of(folder, kind, param)
    facts = [(str(file.relative_to(folder)), _size_of(file), os.stat(file).st_mtime_ns) for file in files]
    query = ShardQuery(param.label_column if labelled else None, param.caption_places)
    fingerprint = json.dumps([VERSION, param.dataset_type, query.label, facts, *query.captions])
    index_path = folder / (f".mm_dit_index-{param.split}.npz" if param.split else INDEX)
    arrays, notes = _read_index(index_path, fingerprint)
    if arrays is None:
        arrays = _scan_shards(files, kind, query)
        if not _write_index(index_path, fingerprint, arrays):
            notes.append(f"note: {index_path} cannot be written: every run scans the shards again")
    left_out = note_of_left_out(Counter(json.loads(str(arrays["left_out"]))))
    notes += left_out
    if arrays["read_bytes"] > MUCH_TO_READ:
        mebibytes = int(arrays["read_bytes"]) / 2**20
        notes.append(
            f"warning: the largest row group has {mebibytes:,.0f} MiB, all of which is read for each "
            "image that is read at random: write the shards with row groups of some 100 images"
        )
    if not len(arrays["labels"]):
        what = "images with labels" if labelled else "images"
        reason = f" ({left_out[0].partition(': ')[2]})" if left_out else ""
        raise DataError(f"dataset_param.data_folder = {folder}", f"its shards hold no {what}{reason}")
    rows = ShardRows(files, arrays["starts"], arrays["where"], np.arange(len(arrays["labels"])), kind.reader())
    labels = _labels_in(arrays, folder, rows, known_classes) if labelled else Labels(arrays["labels"], ())
    caption_json = arrays["told"].tobytes() if query.captions else b""
    names = json.dumps([fact[:2] for fact in facts]).encode()
    digest = hashlib.sha256(names + labels.numbers.tobytes() + caption_json).hexdigest()
    captions = (
        [ImageCaptions(tuple(captions), problem) for captions, problem in json.loads(caption_json)]
        if caption_json
        else []
    )
    images = f"{len(rows):,} images, {digest[:12]}"
    return ShardListing(rows, labels.numbers, labels.classes, (*notes, *labels.notes), images, captions)


def _labels_in(arrays: Mapping[str, np.ndarray], folder: Path, rows: ShardRows, known_classes: Sequence[str]) -> Labels:
    """Return the labels of rows; ``arrays`` has their distinct words, and the number of each row's word."""
    words, stated, numbers = json.loads(str(arrays["words"])), json.loads(str(arrays["stated"])), arrays["labels"]
    labels = labels_of(words, str(folder), lambda word: rows[int((numbers == word).argmax())], stated, known_classes)
    return labels._replace(numbers=labels.numbers[numbers])


def _files_of(folder: Path, kind: ShardFormat, param: DatasetParam) -> list[Path]:
    if not is_folder(folder):
        raise DataError(f"dataset_param.data_folder = {folder}", no_folder(folder), "correct the path in data.json")
    chosen = shard_files(folder, param)
    if not chosen:
        begin = f", and whose names begin with {param.split!r}" if param.split else ""
        raise DataError(f"dataset_param.data_folder = {folder}", f"holds no files that end in {kind.suffix}{begin}")
    splits = sorted({match[1] for path in chosen if (match := _SPLIT.match(path.name))})
    if len(splits) > 1 and param.split is None:
        raise DataError(
            f"dataset_param.data_folder = {folder}",
            f"holds the splits {', '.join(splits)}",
            f'name one: "split": "{"train" if "train" in splits else splits[0]}"',
        )
    return chosen


def shard_files(folder: Path, param: DatasetParam) -> list[Path]:
    """Return the shards of ``param`` in ``folder``, sorted."""
    files = sorted(path for path in folder.rglob("[!.]*") if path.suffix.lower() == KINDS[param.dataset_type].suffix)
    return [path for path in files if path.name.startswith(param.split or "")]


def _size_of(file: Path) -> int:
    try:
        return check_file(file)
    except UnusableFile as problem:
        raise DataError(str(file), str(problem), "fetch it again, or remove it") from None


def _scan_shards(files: Sequence[Path], kind: ShardFormat, query: ShardQuery) -> dict[str, np.ndarray]:
    shards = [kind.scan(file, query) for file in progress("shards", files, total=len(files), unit="shard", delay=2)]
    words = {
        word: number for number, word in enumerate(sorted({word for scanned in shards for word in scanned.labels}))
    }
    return {
        "words": np.array(json.dumps(list(words))),
        "labels": np.array([words[word] for scanned in shards for word in scanned.labels], np.int64),
        "stated": np.array(json.dumps(list(dict.fromkeys(name for scanned in shards for name in scanned.names)))),
        "where": np.concatenate([scanned.where for scanned in shards]),
        "starts": np.concatenate([[0], np.cumsum([len(scanned.labels) for scanned in shards])[:-1]]).astype(np.int64),
        "left_out": np.array(json.dumps(sum((Counter(scanned.left_out) for scanned in shards), Counter[str]()))),
        "read_bytes": np.array(max(scanned.read_bytes for scanned in shards)),
        "told": np.frombuffer(
            json.dumps([image for scanned in shards for image in scanned.captions]).encode(), np.uint8
        ),
    }


def _read_index(path: Path, fingerprint: str) -> tuple[dict[str, np.ndarray] | None, list[str]]:
    """Return the index of exactly these shards, or None, and a note if it is damaged."""
    if not path.is_file():
        return None, []
    try:
        with np.load(path) as file:
            is_ours = str(file["fingerprint"]) == fingerprint
            return ({name: file[name] for name in INDEX_ARRAYS} if is_ours else None), []
    except Exception:  # (a damaged zip file or array can raise anything)
        return None, [f"note: {path} is damaged, so the shards were scanned again"]


def _write_index(path: Path, fingerprint: str, arrays: dict[str, np.ndarray]) -> bool:
    """Write the index atomically; return whether that worked."""
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".mm_dit_", delete=False) as file:
            np.savez(file, fingerprint=np.array(fingerprint), **arrays)
        os.chmod(file.name, 0o644)
        os.replace(file.name, path)
    except OSError:
        with suppress(OSError, NameError):
            os.unlink(file.name)
        return False
    return True
