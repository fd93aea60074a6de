"""A cache of encoded samples on disk, with everything a run must agree on to use it. No framework.

    index.json               what the cache was made from and with, rows per shard; written last
    rows.jsonl               path, label and captions of every row, in order
    null.safetensors         the encoded empty caption of each text condition
    sources.jsonl            the files that the rows were read from, with size, time and digest (cache_sources.py)
    rows-00000.safetensors   mean and, if the posterior is sampled, std: (rows of the shard, views, C, ...);
                             frame_mean, the same for the frames that an image-to-video network is conditioned on;
                             features0 ... of teachers, image_embeds: (rows of the shard, views, N, width);
                             captions (rows,): number of captions of each row; and for each text condition NAME:
                               NAME.tokens (captions,) and NAME.states (all cached states, D), or NAME (captions, P)

The cache keeps the posterior, not a draw from it, so every epoch still draws its own latents. An image has two views,
plain and mirrored; a clip has one. If the text encoder sets its padding to zero, only the states of a caption's tokens
are kept, otherwise all of them: a caption of 20 words takes a twentieth of the padded size.
Shards are mapped into memory. A crash costs one shard, and ranks write their shards without synchronizing.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mindspeed_mm_dit.configs.files import UnusableFile, digest_of, read_bytes
from mindspeed_mm_dit.data.cache_before import rows_of_before
from mindspeed_mm_dit.data.cache_index import INDEX, MAKE_AGAIN, Shard, Texts, first_not_finite, read_index
from mindspeed_mm_dit.data.conditions import NO_CAPTION
from mindspeed_mm_dit.data.labels import named_to_the_last
from mindspeed_mm_dit.data.rows import PROBLEMS_SHOWN, Read, Rows
from mindspeed_mm_dit.data.threads import in_threads
from mindspeed_mm_dit.errors import ConfigError, DataError
from mindspeed_mm_dit.terminal import progress

ROWS, NULL = "rows.jsonl", "null.safetensors"

Arrays = dict[str, np.ndarray]


class Cache:
    """A complete cache, memory-mapped; safe to read from several threads and processes.

    ``setting``: the key of data.json that names it. Raises DataError if it is missing or damaged.
    """

    def __init__(self, folder: str | Path, setting: str) -> None:
        self.folder, self.setting = Path(folder), setting
        self.index = read_index(self.folder, setting)
        self._null = [Texts(self.folder / NULL, self.index.texts, 1)] if self.index.texts else []
        self._shards = [self._open(shard) for shard in range(self.index.num_shards)]

    def _open(self, shard: int) -> Shard:
        return Shard(self.index.shard_path(self.folder, shard), len(self.index.rows_of(shard)), self.index)

    @property
    def latent_shapes(self) -> set[tuple[int, ...]]:
        """Shapes (C, ...) of the latents; an intact cache of one shape has one."""
        return set().union(*(shard.latent_shapes for shard in self._shards))

    def widths(self, name: str) -> set[int]:
        """Return the widths of a condition's encoded captions; an intact cache has one."""
        return {shard.texts.width(name) for shard in self._shards}

    def check_features(self, expected: Mapping[str, tuple[int, int]], what: str) -> None:
        """Raise ConfigError unless the cache has the ``expected`` features, given as shapes (N, width) by name."""
        for name, shape in expected.items():
            for actual in {shard.latents[name].shape[2:] if name in shard.latents else None for shard in self._shards}:
                if actual != shape:
                    raise ConfigError(
                        what,
                        f"holds {name} of shape {actual}, but the predictor expects {shape}",
                        "correct predictor.z_dims, or make another cache",
                    )

    def rows(self, data_folder: str) -> Rows:
        """Return the rows, with paths below ``data_folder``; raises DataError if their list is damaged."""
        entries = self._listed()
        items: dict[str, Any] = {}
        if all("label" in row for row in entries):
            items["label"] = np.array([row["label"] for row in entries], np.int64)
        if all("vector" in shard.latents for shard in self._shards):
            items["vector"] = np.concatenate([shard.latents["vector"] for shard in self._shards])
        if self.index.texts:
            counts = np.concatenate([shard.texts.counts for shard in self._shards]).tolist()
            listed = (row.get("captions") for row in entries)
            items["caption"] = tuple(
                tuple(captions) if captions else tuple(f"caption {n}" for n in range(count))
                for captions, count in zip(listed, counts)
            )
        classes = self.index.classes
        if not classes and "label" in items:
            classes = named_to_the_last((), items["label"])
        paths = tuple(str(Path(data_folder, row["path"])) for row in entries)
        index = self.index
        shapes = np.array([row["shape"] for row in entries], np.int64) if index.ragged else None
        return Rows(
            paths, items, classes, index.skipped, digest=index.digest, shapes=shapes, cached=np.arange(len(paths))
        )

    @property
    def knows_captions(self) -> bool:
        """Whether the cache has the captions as text."""
        return all("captions" in row for row in self._listed())

    def _listed(self) -> list[dict[str, Any]]:
        try:
            old_entries = rows_of_before(self.folder, self.index.stem, self.index.num_rows)
            if old_entries is not None:
                return old_entries
            entries = [json.loads(line) for line in read_bytes(self.folder / ROWS).splitlines()]
            if len(entries) != self.index.num_rows or not all(isinstance(row.get("path"), str) for row in entries):
                raise ValueError(f"it lists {len(entries)} rows, but {INDEX} counts {self.index.num_rows}")
        except (UnusableFile, ValueError, AttributeError) as error:
            raise DataError(
                f"{self.setting} = {self.folder}",
                f"{ROWS} cannot be read: {error}",
                "run mm-dit cache-latents again: it keeps what is encoded",
            ) from None
        return entries

    def read_latents(self, rows: np.ndarray, views: np.ndarray) -> Arrays:
        """Return the cached moments of ``rows`` (B,) in ``views`` (B,), (B, C, ...) float32, unscaled.

        Also return the cached features, if there are any, (B, N, width) float32.
        Raises:
            DataError: a value is not finite, so a step with it would corrupt the weights.
        """
        shards, positions = np.divmod(rows, self.index.shard_rows)
        keys = list(zip(shards.tolist(), positions.tolist(), views.astype(int).tolist()))
        arrays = {
            name: np.stack([self._shards[shard].latent(name, position, view) for shard, position, view in keys])
            for name in (*self.index.moments, *self.index.features)
        }
        arrays = {name: array.astype(np.float32) for name, array in arrays.items()}
        self._check_finite(arrays, rows)
        return arrays

    def read_text(self, name: str, rows: np.ndarray, numbers: np.ndarray) -> Arrays:
        """Return one encoded caption per row of ``rows`` (B,), chosen by ``numbers`` (B,); -1 is the empty caption.

        ``name`` (B, L, D) float32 and ``name``_mask (B, L) int64, 0 for padding; or ``name`` (B, P) float32.
        Raises:
            DataError: a value is not finite.
        """
        positions = [divmod(row, self.index.shard_rows) for row in rows.tolist()]
        texts = [
            self._null[0].read(name, 0, 0)
            if number == NO_CAPTION
            else self._shards[shard].texts.read(name, position, number)
            for (shard, position), number in zip(positions, numbers.tolist())
        ]
        batch = {name: np.stack([states for states, _ in texts])}
        self._check_finite(batch, rows)
        masks = [mask for _, mask in texts if mask is not None]
        return {**batch, f"{name}_mask": np.stack(masks)} if masks else batch

    def _check_finite(self, arrays: Mapping[str, np.ndarray], rows: np.ndarray) -> None:
        bad = first_not_finite(*arrays.values())
        if bad is not None:
            row = int(rows[bad])
            raise DataError(
                str(self.index.shard_path(self.folder, row // self.index.shard_rows)),
                f"row {row}, {self._listed()[row]['path']}, has a value that is not finite",
                MAKE_AGAIN,
            )


class CachedVisuals:
    """Reads the latents of cached rows, with the interface of the readers of files (``Visuals``)."""

    def __init__(self, cache: Cache, rows: Rows, file_reader: Any, with_std: bool, others: Sequence[str] = ()) -> None:
        """``file_reader``: the reader of the rows' files, which decides the views.

        others: names of the features and of the latents of conditioning frames to read.
        """
        self.views, self._cache, self._rows = cache.index.views, cache, rows
        self._with_std, self._others = with_std, others
        self._file_reader = file_reader

    def views_at(self, seed: int, sample_indices: np.ndarray) -> np.ndarray:
        """Return the view of each sample, the same as for the files."""
        return self._file_reader.views_at(seed, sample_indices)

    def read(self, rows: np.ndarray, views: np.ndarray) -> Read:
        """Return latent_mean and, for a sampled posterior, latent_std, each (B, C, ...) float32, unscaled."""
        assert self._rows.cached is not None, "rows of a cache have their indices in it"
        arrays = self._cache.read_latents(self._rows.cached[rows], views)
        names = ("mean", "std") if self._with_std else ("mean",)
        latents = {f"latent_{name}": arrays[name] for name in names}
        return Read(latents | {name: arrays[name] for name in self._others}, rows)


SOURCES = "sources.jsonl"
READ_BYTES = 256 * 2**20
"""Files of up to this size in all are read by every run, which takes less than a second."""
NOT_RECORDED = "does not record its source files (it is of an earlier version), so changes of them are not noticed"


class SourceFile(NamedTuple):
    """A file as it was when a cache was made."""

    path: str
    """Relative to ``data_folder``."""
    size: int
    """In bytes."""
    mtime_ns: int
    digest: str


def source_files(rows: Rows, folder: str) -> list[SourceFile]:
    """Return the files that ``rows`` are read from, each read once; raises DataError if one cannot be read."""

    def look(path: str) -> SourceFile:
        stat = os.stat(path)
        return SourceFile(os.path.relpath(path, folder), stat.st_size, stat.st_mtime_ns, digest_of(path).hex())

    paths = [path for path in dict.fromkeys(rows.files or rows.paths) if os.path.isfile(path)]
    try:
        return list(progress("reading files", in_threads(look, paths), total=len(paths), unit="file", delay=2))
    except (UnusableFile, OSError) as error:
        raise DataError(folder, f"a file cannot be read: {error}", "run the command again") from None


def digest_of_sources(files: Iterable[SourceFile]) -> str:
    """Return a digest of the paths and contents of ``files``, whatever their times are."""
    lines = sorted(f"{file.path}\0{file.digest}\n" for file in files)
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def sources_json(files: Iterable[SourceFile]) -> str:
    """Return the content of SOURCES."""
    return "".join(json.dumps(file) + "\n" for file in files)


def check_sources(cache: Path, setting: str, folder: str, listed: Sequence[str] = ()) -> tuple[str, ...]:
    """Return notes on the source files of a ``cache``; ``setting``: the key of data.json that names it.

    folder: where the files are looked for; listed: files that the cache must have been made from, if it records any.
    Raises DataError, naming those that changed or were added since the cache was made.
    """
    if not os.path.isdir(folder):
        return ()
    if not (cache / SOURCES).exists():
        return (f"note: {cache} {NOT_RECORDED}; mm-dit cache-latents into another folder makes one that does",)
    try:
        files = [SourceFile(*json.loads(line)) for line in read_bytes(cache / SOURCES).splitlines()]
        changed, touched = _compared(files, folder)
        changed += sorted({os.path.relpath(path, folder) for path in listed} - {file.path for file in files})
    except (UnusableFile, ValueError, TypeError, RecursionError) as error:
        cure = "run mm-dit cache-latents again: it keeps what is encoded"
        raise DataError(f"{setting} = {cache}", f"{SOURCES} cannot be read: {error}", cure) from None
    if changed:
        names = ", ".join(changed[:PROBLEMS_SHOWN]) + (", ..." if len(changed) > PROBLEMS_SHOWN else "")
        raise DataError(
            f"{setting} = {cache}",
            f"was made before files in {folder} were changed or added, {len(changed):,} in all: {names}",
            "make the cache again, in an empty folder: mm-dit cache-latents --model ... --data ... --output ...",
        )
    if touched:
        return (
            f"note: {touched:,} source files of {cache} have new modification times but the same bytes, and were read; "
            "mm-dit cache-latents into the same folder records the new times",
        )
    return ()


def _compared(files: Sequence[SourceFile], folder: str) -> tuple[list[str], int]:
    """Return the names of the files that changed, and how many others had only another time and were read."""
    reads_all = sum(file.size for file in files) <= READ_BYTES

    def look(file: SourceFile) -> str:
        path = os.path.join(folder, file.path)
        try:
            stat = os.stat(path)
            if stat.st_size != file.size:
                return "changed"
            has_time = stat.st_mtime_ns == file.mtime_ns
            if has_time and not reads_all:
                return ""
            if digest_of(path).hex() != file.digest:
                return "changed"
            return "" if has_time or reads_all else "touched"
        except (UnusableFile, OSError, ValueError):  # (absent or not readable: it is not needed)
            return ""

    looks = in_threads(look, files)
    states = list(progress("comparing files", looks, total=len(files), unit="file", delay=2))
    return [file.path for file, state in zip(files, states) if state == "changed"], states.count("touched")
