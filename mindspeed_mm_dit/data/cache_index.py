"""The index.json of a cache, its shards of latents and encoded captions, and the check that a run agrees with them.

Shards are mapped into memory. No framework.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from mindspeed_mm_dit.configs.files import UnusableFile, check_file, read_bytes
from mindspeed_mm_dit.configs.limits import short_repr
from mindspeed_mm_dit.configs.strict import from_mapping
from mindspeed_mm_dit.data.cache_before import CLIPS_BEFORE, index_of_before, names_of_before
from mindspeed_mm_dit.errors import ConfigError, DataError

INDEX = "index.json"
GO_ON = "run mm-dit cache-latents; it resumes where it was interrupted"


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
                raise ConfigError(f"{name} = {getattr(self, name)}", "must be positive", GO_ON)

    @property
    def lists_files(self) -> bool:
        """Whether the rows have their paths and captions; version 0.1 stored none for clips."""
        return self.stem != CLIPS_BEFORE

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
    """Read index.json, of this version or an earlier one; raises DataError if the cache is missing or not finished."""
    where = f"{folder}/{INDEX}"
    try:
        content = json.loads(read_bytes(folder / INDEX))
    except (UnusableFile, ValueError, RecursionError) as error:
        cure = f"run mm-dit cache-latents with --output {folder}; it resumes where it was interrupted"
        raise DataError(f"{setting} = {folder}", f"holds no finished cache: {INDEX} {error}", cure) from None
    if isinstance(content, dict):
        content = index_of_before(content, where)
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
            a, b = (short_repr(_SHA256.sub(r"\1", part)) for part in _parts_that_differ(there, here))
            raise ConfigError(
                where,
                f"was made with {words}: {a} there and {b} here",
                "make the cache again, in another folder: mm-dit cache-latents --model ... --data ... --output ...",
            )


def _parts_that_differ(there: str, here: str) -> tuple[str, str]:
    """Return the comma-separated parts in which two texts differ."""
    parts = there.split(", "), here.split(", ")
    if len(parts[0]) != len(parts[1]):
        return there, here
    pairs = [(a, b) for a, b in zip(*parts) if a != b]
    return ", ".join(a for a, _ in pairs), ", ".join(b for _, b in pairs)


MAKE_AGAIN = "remove it and run mm-dit cache-latents again: it keeps the other shards"
_MOMENTS = ("mean", "std", "frame_mean")
_DTYPES = {"F32": np.float32, "F16": np.float16, "I64": np.int64}


def map_tensors(path: Path) -> dict[str, Any]:
    """Map the tensors of a safetensors file into memory.

    Raises:
        DataError: it is damaged. A truncated file is not mapped, since reading past its end would end the process.
    """
    try:
        check_file(path)
        with safe_open(path, "numpy"):  # compares the header with the size of the file
            pass
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        return {
            name: np.memmap(
                path, _DTYPES[spec["dtype"]], "r", 8 + length + spec["data_offsets"][0], tuple(spec["shape"])
            )
            for name, spec in header.items()
        }
    except (UnusableFile, SafetensorError, OSError, ValueError, KeyError) as error:
        raise DataError(str(path), f"is not a shard of a cache: {error}", MAKE_AGAIN) from None


def metadata_of(path: Path) -> dict[str, str]:
    """Return the metadata of a safetensors file; raises DataError if it is damaged."""
    try:
        with safe_open(path, "numpy") as file:
            return file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise DataError(str(path), f"is not a shard of a cache: {error}", MAKE_AGAIN) from None


class Texts:
    """The encoded captions of some rows, one caption after another."""

    def __init__(self, path: Path, texts: Mapping[str, CachedText], rows: int) -> None:
        self._texts, tensors = texts, names_of_before(map_tensors(path))
        self.counts = np.asarray(tensors.get("captions", np.ones(rows, np.int64)))
        self._first = np.cumsum(self.counts) - self.counts
        self._arrays = {
            name: _tensor(tensors, path, f"{name}.states" if text.length else name) for name, text in texts.items()
        }
        self._tokens = {
            name: np.asarray(_tensor(tensors, path, f"{name}.tokens")) for name, text in texts.items() if text.length
        }
        self._ends: dict[str, np.ndarray] = {}
        for name, array in self._arrays.items():
            self._check(path, name, array, rows)

    def _check(self, path: Path, name: str, array: np.ndarray, rows: int) -> None:
        captions = int(self.counts.sum())
        if name in self._tokens:
            num_states = self._texts[name].num_states(self._tokens[name])
            self._ends[name] = np.cumsum(num_states)
            if array.ndim != 2 or len(array) != num_states.sum():
                raise DataError(str(path), f"holds {array.shape} states of {num_states.sum()} tokens", MAKE_AGAIN)
        entries = len(self._tokens.get(name, array))
        if len(self.counts) != rows or entries != captions:
            raise DataError(str(path), f"holds other rows or captions than the {rows} of the index", MAKE_AGAIN)

    def width(self, name: str) -> int:
        """Return the width of a state, or of a vector."""
        return int(self._arrays[name].shape[1])

    def read(self, name: str, row: int, number: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Return states (L, D) float32 and mask (L,) int64 of caption ``number`` of ``row``; or a vector and None."""
        caption, array, length = int(self._first[row]) + number, self._arrays[name], self._texts[name].length
        if not length:
            return array[caption].astype(np.float32), None
        end, tokens = int(self._ends[name][caption]), int(self._tokens[name][caption])
        count = int(self._texts[name].num_states(self._tokens[name])[caption])
        states = np.zeros((length, array.shape[1]), np.float32)
        states[:count] = array[end - count : end]
        return states, (np.arange(length) < tokens).astype(np.int64)


class Shard:
    """Some rows: their latents and their encoded captions."""

    def __init__(self, path: Path, rows: int, index: CacheIndex) -> None:
        tensors = map_tensors(path)
        names = (*_MOMENTS, "vector", *index.features)
        latents = {name: tensors[name] for name in names if name in tensors}
        if index.stem == "features":  # version 0.1: one view, without an axis of its own
            latents = {name: array[:, None] for name, array in latents.items()}
        self.path, self.latents, self._views = path, latents, index.views
        self._shapes = tensors["latent_shape"] if index.ragged and "latent_shape" in tensors else None
        if index.ragged:
            self._ends = self._checked_ends(rows, index)
        else:
            self._check_stacked(rows, index)
        self.texts = Texts(path, index.texts, rows)

    def _checked_ends(self, rows: int, index: CacheIndex) -> np.ndarray:
        """Return where the elements of each row end, (rows,) int64; raises DataError if some are missing."""
        ends = np.cumsum([np.prod(shape) * index.views for shape in self._shapes]) if self._shapes is not None else []
        shapes = {name: array.shape for name, array in self.latents.items() if name in _MOMENTS}
        if len(ends) != rows or shapes != dict.fromkeys(index.moments, (int(ends[-1]),)):
            expected = f"{' and '.join(index.moments)} of {rows} rows, with latent_shape"
            raise DataError(str(self.path), f"holds {shapes}, not {expected}", MAKE_AGAIN)
        return np.asarray(ends, np.int64)

    def _check_stacked(self, rows: int, index: CacheIndex) -> None:
        """Raise DataError unless all latents are (rows, views, C, ...)."""
        shapes = {name: array.shape for name, array in self.latents.items() if name in _MOMENTS}
        shape = shapes.get("mean", ())
        if len(shape) < 4 or shape[:2] != (rows, index.views) or shapes != dict.fromkeys(index.moments, shape):
            expected = f"{' and '.join(index.moments)} (({rows}, {index.views}, C, ...) each)"
            raise DataError(str(self.path), f"holds {shapes}, not {expected}", MAKE_AGAIN)

    @property
    def latent_shapes(self) -> set[tuple[int, ...]]:
        """Shapes (C, ...) of the latents."""
        if self._shapes is None:
            return {self.latents["mean"].shape[2:]}
        return {tuple(shape) for shape in np.unique(self._shapes, axis=0).tolist()}

    def latent(self, name: str, position: int, view: int) -> np.ndarray:
        """Return a moment (C, ...) of a row in a view, or the features of a teacher or an image encoder."""
        if self._shapes is None or name not in _MOMENTS:
            return self.latents[name][position, view]
        shape = tuple(self._shapes[position].tolist())
        size = math.prod(shape)
        first = int(self._ends[position]) - (self._views - view) * size
        return self.latents[name][first : first + size].reshape(shape)


def _tensor(tensors: Mapping[str, Any], path: Path, name: str) -> Any:
    if name not in tensors:
        raise DataError(str(path), f"holds no {name}", MAKE_AGAIN)
    return tensors[name]


def first_not_finite(*arrays: np.ndarray) -> int | None:
    """Return the first row (axis 0 of all ``arrays``) with a value that is not finite; None if all are finite."""
    good = np.logical_and.reduce([np.isfinite(array).all(axis=tuple(range(1, array.ndim))) for array in arrays])
    return None if good.all() else int(np.argmin(good))
