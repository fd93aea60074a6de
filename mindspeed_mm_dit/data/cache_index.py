"""What a cache was made from and with: its index.json, and its source files; and the check that a run agrees with them.

    sources.jsonl   a line for each file: path below data_folder, bytes, modification time in ns, digest

A source file of another size has changed, and one that is absent is not needed. Otherwise the digest decides, except
that a file with the recorded time counts as unchanged, unread, if the files have more than READ_BYTES in all.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mindspeed_mm_dit.configs.files import UnusableFile, digest_of, error_text, read_bytes
from mindspeed_mm_dit.configs.limits import shorten_repr
from mindspeed_mm_dit.configs.strict import from_mapping
from mindspeed_mm_dit.data.sources import CACHE_AGAIN, Rows, first_names, map_in_threads
from mindspeed_mm_dit.errors import ConfigError, DataError

INDEX, SOURCES = "index.json", "sources.jsonl"
READ_BYTES = 256 * 2**20
"""Files of up to this size in all are read by every run, which takes less than a second."""
RESUMES = "Run mm-dit cache-latents again, which keeps what is encoded."


@dataclass(frozen=True)
class CachedText:
    """How the cache stores the texts of one condition."""

    length: int = 0
    """Tokens L of a caption with its padding; 0 if one vector is kept per caption."""
    pads_with_zeros: bool = False
    """Whether the states of the padding are zero and therefore not kept."""

    def num_states(self, tokens: np.ndarray) -> np.ndarray:
        """Return how many states are kept for captions of ``tokens`` tokens."""
        return tokens if self.pads_with_zeros else np.full_like(tokens, self.length)


@dataclass(frozen=True)
class CacheIndex:
    """All of index.json."""

    made_by: dict
    """What the numbers in the cache depend on, in words, by name; a run must agree with each."""
    num_rows: int
    """Rows over all shards."""
    shard_rows: int
    """Rows in each shard but the last."""
    views: int = 1
    """Views kept per row."""
    with_std: bool = False
    """Whether the posterior's standard deviation is kept as well as its mean."""
    texts: dict = field(default_factory=dict)
    """``CachedText`` by the condition's name."""
    skipped: int = 0
    """Rows of the data set that could not be used and are not in the cache."""
    classes: tuple[str, ...] = ()
    """Name of each label; empty if there are none."""
    digest: str = ""
    """``Rows.digest``, which tells data sets apart; empty if unknown."""
    stem: str = "rows"
    """Prefix of the shards' names."""
    features: tuple[str, ...] = ()
    """Names of the tensors with features of teachers and of an image encoder."""
    ragged: bool = False
    """Whether latents have several shapes. Moments are then (elements,), all views of a row one after another;
    ``latent_shape`` (rows, axes) has the shape of each row, and rows.jsonl its ``shape`` in pixels."""
    with_frames: bool = False
    """Whether the latents of conditioning frames are kept."""

    def __post_init__(self) -> None:
        for name in ("num_rows", "shard_rows"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{INDEX} has {name} = {getattr(self, name)}, which must be positive. {RESUMES}")

    @property
    def num_shards(self) -> int:
        """Number of shard files."""
        return -(-self.num_rows // self.shard_rows)

    def rows_of(self, shard: int) -> range:
        """Return the rows of a shard."""
        return range(shard * self.shard_rows, min((shard + 1) * self.shard_rows, self.num_rows))

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the latents' tensors."""
        return ("mean", *(["std"] if self.with_std else []), *(["frame_mean"] if self.with_frames else []))

    def shard_path(self, folder: Path, shard: int) -> Path:
        """Return the path of a shard."""
        return folder / f"{self.stem}-{shard:05d}.safetensors"


def read_index(folder: Path, setting: str) -> CacheIndex:
    """Read index.json; raises DataError if the cache is missing, not finished, or of version 0.1."""
    where = f"{folder}/{INDEX}"
    try:
        content = json.loads(read_bytes(folder / INDEX))
    except (UnusableFile, ValueError, RecursionError) as error:
        problem = error if isinstance(error, UnusableFile) else f"is not JSON: {error}"
        raise DataError(
            f"{setting} = {folder} holds no finished cache: {INDEX} {problem}. Run mm-dit cache-latents with --output "
            f"{folder}, which resumes where it was interrupted."
        ) from None
    if isinstance(content, dict):
        if "identity" in content:
            raise DataError(f"{setting} = {folder} was made by version 0.1, whose caches are not read. {CACHE_AGAIN}")
        texts = content.get("texts")
        if isinstance(texts, dict):
            content["texts"] = {name: from_mapping(CachedText, text, f"{where}: texts") for name, text in texts.items()}
    return from_mapping(CacheIndex, content, where)


_WORDS = {
    "rows": "other samples (how many, and the digest of names, sizes and labels or captions)",
    "sources": "files of other content",
    "pixels": "another size or crop",
    "autoencoder": "another autoencoder, precision or tiling",
    "text_encoder": "another text encoder, tokenizer, cleaning of captions or precision",
    "text": "another length or padding of texts",
    "frames": "other conditioning frames",
    "image_encoder": "another image encoder or precision",
}
_SHA256 = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{52}\b")


def check_same(where: str, cached: Mapping[str, str], expected: Mapping[str, str]) -> None:
    """Raise ConfigError naming the first difference between what a cache was made with and what a run expects."""
    for key, here in expected.items():
        there = cached.get(key, "absent")
        if there != here:
            kind = "teacher" if key.startswith("features") else key.partition("[")[0]
            words = _WORDS.get(kind, f"another {kind}")
            parts = there.split(", "), here.split(", ")
            if len(parts[0]) == len(parts[1]):  # (only the parts that differ)
                pairs = [(a, b) for a, b in zip(*parts) if a != b]
                there, here = (", ".join(pair[side] for pair in pairs) for side in (0, 1))
            there, here = (shorten_repr(_SHA256.sub(r"\1", part)) for part in (there, here))
            raise ConfigError(f"{where} was made with {words}: {there}, but this run has {here}. {CACHE_AGAIN}")


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
        try:
            stat, digest = os.stat(path), digest_of(path)
        except (UnusableFile, OSError) as error:
            problem = error if isinstance(error, UnusableFile) else f"cannot be read: {error_text(error)}"
            raise DataError(f"{path} {problem}. Run the command again.") from None
        return SourceFile(os.path.relpath(path, folder), stat.st_size, stat.st_mtime_ns, digest.hex())

    paths = [path for path in dict.fromkeys(rows.files or rows.paths) if os.path.isfile(path)]
    return list(map_in_threads(look, paths, "reading files"))


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
        return (
            f"note: {cache} does not record its source files (it is of an earlier version), so changes of them are not "
            "noticed; mm-dit cache-latents into another folder makes one that does",
        )
    try:
        files = [SourceFile(*json.loads(line)) for line in read_bytes(cache / SOURCES).splitlines()]
        changed, touched = _compared(files, folder)
        changed += sorted({os.path.relpath(path, folder) for path in listed} - {file.path for file in files})
    except (UnusableFile, ValueError, TypeError, RecursionError) as error:
        problem = error if isinstance(error, UnusableFile) else f"cannot be read: {error}"
        raise DataError(f"{cache / SOURCES} {problem}. {RESUMES}") from None
    if changed:
        raise DataError(
            f"{setting} = {cache} was made before files in {folder} were changed or added ({len(changed):,} in all: "
            f"{first_names(changed)}). {CACHE_AGAIN}"
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

    states = list(map_in_threads(look, files, "comparing files"))
    return [file.path for file, state in zip(files, states) if state == "changed"], states.count("touched")
