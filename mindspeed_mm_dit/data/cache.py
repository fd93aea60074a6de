"""Samples on disk, encoded once, with all that a run must agree on to use them. No framework.

    index.json               what the cache was made of and by, its rows per shard; written last
    rows.jsonl               path, label and captions of every row, in order
    null.safetensors         of each text condition, what stands for the empty caption
    rows-00000.safetensors   mean and, where the posterior is sampled, std: (rows of the shard, views, C, ...);
                             features0 ... of teachers: (rows of the shard, views, N, width);
                             captions (rows,): how many each has; and of each text condition, by its name:
                               NAME.tokens (captions,) and NAME.states (kept of all captions, D), or NAME (captions, P)

A posterior is kept, not a draw from it, so every epoch still draws its own latents. Views are an image as it is and
mirrored; of a clip there is one. Of a caption as many states are kept as it has tokens where the text encoder sets its
padding to zero, and all where it does not: a caption of 20 words takes a twentieth of what it takes padded.
Shards are mapped into memory, a crash costs one of them, and ranks write theirs without meeting.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.files import UnusableFile, read_bytes
from mindspeed_mm_dit.configs.limits import shown
from mindspeed_mm_dit.configs.strict import from_mapping
from mindspeed_mm_dit.data.cache_before import index_of_before, names_of_before, rows_of_before
from mindspeed_mm_dit.data.conditions.text import NO_CAPTION
from mindspeed_mm_dit.data.mapped import MAKE_AGAIN, map_tensors
from mindspeed_mm_dit.data.rows import Read, Rows
from mindspeed_mm_dit.errors import ConfigError, DataError

INDEX, ROWS, NULL = "index.json", "rows.jsonl", "null.safetensors"
GO_ON = "run mm-dit cache-latents; it goes on where it was interrupted"

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class KeptText:
    """How the texts of one condition are kept."""

    length: int = 0
    """Tokens L of a caption with its padding; 0 where one vector is kept of each."""
    pads_with_zeros: bool = False
    """Whether the states of the padding are zero, and so not kept."""

    def kept(self, tokens: np.ndarray) -> np.ndarray:
        """Return how many states are kept of captions with so many ``tokens``."""
        return tokens if self.pads_with_zeros else np.full_like(tokens, self.length)


@dataclass(frozen=True)
class CacheIndex:
    """All of index.json."""

    made_by: dict
    """What decides the numbers in the cache, in words, by what a run calls it; a run must agree on each."""
    num_rows: int
    """Rows over all shards."""
    shard_rows: int
    """Rows in each shard but the last."""
    views: int = 1
    """Views that are kept of each row."""
    with_std: bool = False
    """Whether the posterior's standard deviation is kept beside its mean."""
    texts: dict = field(default_factory=dict)
    """``KeptText`` by the condition's name."""
    skipped: int = 0
    """Rows of the data set that could not be used, and are not here."""
    classes: tuple[str, ...] = ()
    """Name of each label; empty where there are none."""
    digest: str = ""
    """``Rows.digest``: what tells data sets apart; empty where it is not known."""
    stem: str = "rows"
    """What the names of the shards begin with."""
    features: tuple[str, ...] = ()
    """Names of the tensors of teachers' features."""
    ragged: bool = False
    """Whether latents have several shapes: moments are then (elements,), all views of a row one after another, and
    ``latent_shape`` (rows, axes) says how each is laid out; rows.jsonl has the ``shape`` of each in pixels."""

    def __post_init__(self) -> None:
        for name in ("num_rows", "shard_rows"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)}", "must be positive", GO_ON)

    @property
    def num_shards(self) -> int:
        """Number of shard files."""
        return -(-self.num_rows // self.shard_rows)

    def rows_of(self, shard: int) -> range:
        """Return the rows of a shard."""
        return range(shard * self.shard_rows, min((shard + 1) * self.shard_rows, self.num_rows))

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the tensors of latents."""
        return ("mean", "std") if self.with_std else ("mean",)

    def shard_path(self, folder: Path, shard: int) -> Path:
        """Return where a shard stands."""
        return folder / f"{self.stem}-{shard:05d}.safetensors"


def read_index(folder: Path, setting: str) -> CacheIndex:
    """Read index.json, of this version or one before; raises DataError if the cache is missing or not finished."""
    where = f"{folder}/{INDEX}"
    try:
        content = json.loads(read_bytes(folder / INDEX))
    except (UnusableFile, ValueError, RecursionError) as error:
        cure = f"run mm-dit cache-latents with --output {folder}; it goes on where it was interrupted"
        raise DataError(f"{setting} = {folder}", f"holds no finished cache: {INDEX} {error}", cure) from None
    if isinstance(content, dict):
        content = index_of_before(content, where)
        texts = content.get("texts")
        if isinstance(texts, dict):
            content["texts"] = {name: from_mapping(KeptText, kept, f"{where}: texts") for name, kept in texts.items()}
    return from_mapping(CacheIndex, content, where)


class Cache:
    """A complete cache, memory-mapped; safe to read from several threads and processes.

    ``setting``: the key of data.json that names it. Raises DataError where it is missing or damaged.
    """

    def __init__(self, folder: str | Path, setting: str) -> None:
        self.folder, self.setting = Path(folder), setting
        self.index = read_index(self.folder, setting)
        self._null = [_Texts(self.folder / NULL, self.index.texts, 1)] if self.index.texts else []
        self._shards = [self._open(shard) for shard in range(self.index.num_shards)]

    def _open(self, shard: int) -> _Shard:
        return _Shard(self.index.shard_path(self.folder, shard), len(self.index.rows_of(shard)), self.index)

    @property
    def latent_shapes(self) -> set[tuple[int, ...]]:
        """(C, ...) of the latents; of a good cache of one shape one."""
        return set().union(*(shard.latent_shapes for shard in self._shards))

    def widths(self, name: str) -> set[int]:
        """Return the width of the texts of a condition; of a good cache one."""
        return {shard.texts.width(name) for shard in self._shards}

    def check_features(self, wanted: Mapping[str, tuple[int, int]], what: str) -> None:
        """Raise ConfigError unless features are kept as they are ``wanted``, shapes (N, width) by name."""
        for name, shape in wanted.items():
            for found in {shard.latents[name].shape[2:] if name in shard.latents else None for shard in self._shards}:
                if found != shape:
                    raise ConfigError(what, f"holds {name} of {found}, and the predictor learns {shape}",
                                      "correct predictor.z_dims, or make a cache of its own")  # fmt: skip

    def rows(self, data_folder: str) -> Rows:
        """Return the rows, whose files stood below ``data_folder``; raises DataError where their list is damaged."""
        found = self._listed()
        items: dict[str, Any] = {}
        if all("label" in row for row in found):
            items["label"] = np.array([row["label"] for row in found], np.int64)
        if all("vector" in shard.latents for shard in self._shards):
            items["vector"] = np.concatenate([shard.latents["vector"] for shard in self._shards])
        if self.index.texts:
            counts = np.concatenate([shard.texts.counts for shard in self._shards]).tolist()
            words = (row.get("captions") for row in found)
            items["caption"] = tuple(
                tuple(own) if own else tuple(f"caption {n}" for n in range(count)) for own, count in zip(words, counts)
            )
        classes = self.index.classes
        if not classes and "label" in items:
            classes = tuple(map(str, range(1 + int(items["label"].max()))))
        paths = tuple(str(Path(data_folder, row["path"])) for row in found)
        index = self.index
        shapes = np.array([row["shape"] for row in found], np.int64) if index.ragged else None
        return Rows(
            paths, items, classes, index.skipped, digest=index.digest, shapes=shapes, cached=np.arange(len(paths))
        )

    @property
    def knows_captions(self) -> bool:
        """Whether the words of the captions are kept."""
        return all("captions" in row for row in self._listed())

    def _listed(self) -> list[dict[str, Any]]:
        try:
            before = rows_of_before(self.folder, self.index.stem, self.index.num_rows)
            if before is not None:
                return before
            found = [json.loads(line) for line in read_bytes(self.folder / ROWS).splitlines()]
            if len(found) != self.index.num_rows or not all(isinstance(row.get("path"), str) for row in found):
                raise ValueError(f"it lists {len(found)} rows, where {INDEX} counts {self.index.num_rows}")
        except (UnusableFile, ValueError, AttributeError) as error:
            raise DataError(
                f"{self.setting} = {self.folder}", f"{ROWS} cannot be read: {error}",
                "run mm-dit cache-latents again: it keeps what is encoded",
            ) from None  # fmt: skip
        return found

    def read_latents(self, rows: np.ndarray, views: np.ndarray) -> Arrays:
        """Return mean and, where it is kept, std of ``rows`` (B,) in ``views`` (B,), (B, C, ...) float32, unscaled.

        And, where they are kept, the features of teachers, (B, N, width) float32.
        Raises:
            DataError: one is not finite, so a step with it would spoil the weights.
        """
        shards, places = np.divmod(rows, self.index.shard_rows)
        wanted = list(zip(shards.tolist(), places.tolist(), views.astype(int).tolist()))
        found = {
            name: np.stack([self._shards[shard].latent(name, place, view) for shard, place, view in wanted])
            for name in (*self.index.moments, *self.index.features)
        }
        found = {name: array.astype(np.float32) for name, array in found.items()}
        self._check_finite(found, rows)
        return found

    def read_text(self, name: str, rows: np.ndarray, numbers: np.ndarray) -> Arrays:
        """Return what is kept of one caption of each of ``rows`` (B,), of the number in ``numbers`` (B,), or -1: none.

        ``name`` (B, L, D) float32 and ``name``_mask (B, L) int64, 0 for padding; or ``name`` (B, P) float32.
        Raises:
            DataError: one is not finite.
        """
        places = [divmod(row, self.index.shard_rows) for row in rows.tolist()]
        found = [
            self._null[0].read(name, 0, 0)
            if number == NO_CAPTION
            else self._shards[shard].texts.read(name, place, number)
            for (shard, place), number in zip(places, numbers.tolist())
        ]
        batch = {name: np.stack([states for states, _ in found])}
        self._check_finite(batch, rows)
        masks = [mask for _, mask in found if mask is not None]
        return {**batch, f"{name}_mask": np.stack(masks)} if masks else batch

    def _check_finite(self, arrays: Mapping[str, np.ndarray], rows: np.ndarray) -> None:
        bad = first_not_finite(*arrays.values())
        if bad is not None:
            row = int(rows[bad])
            raise DataError(
                str(self.index.shard_path(self.folder, row // self.index.shard_rows)),
                f"what it keeps of row {row}, {self._listed()[row]['path']}, is not finite", MAKE_AGAIN,
            )  # fmt: skip


class CachedVisuals:
    """The latents of rows of a cache, as the readers of files give their pixels (``Visuals``)."""

    def __init__(self, cache: Cache, rows: Rows, of_files: Any, with_std: bool, features: Sequence[str] = ()) -> None:
        """``of_files``: what would read the rows from their files, which knows which view stands where.

        features: names of those of teachers that are read.
        """
        self.views, self._cache, self._rows = cache.index.views, cache, rows
        self._with_std, self._features = with_std, features
        self._of_files = of_files

    def views_at(self, seed: int, positions: np.ndarray) -> np.ndarray:
        """Return the view of each sample, as it is of the files."""
        return self._of_files.views_at(seed, positions)

    def read(self, rows: np.ndarray, views: np.ndarray) -> Read:
        """Return latent_mean and, for a sampled posterior, latent_std, each (B, C, ...) float32, unscaled."""
        assert self._rows.cached is not None, "rows of a cache know where they stand"
        found = self._cache.read_latents(self._rows.cached[rows], views)
        names = ("mean", "std") if self._with_std else ("mean",)
        latents = {f"latent_{name}": found[name] for name in names}
        return Read(latents | {name: found[name] for name in self._features}, rows)


class _Texts:
    """What is kept of the captions of some rows, one caption after another."""

    def __init__(self, path: Path, kept: Mapping[str, KeptText], rows: int) -> None:
        self._kept, tensors = kept, names_of_before(map_tensors(path))
        self.counts = np.asarray(tensors.get("captions", np.ones(rows, np.int64)))
        self._first = np.cumsum(self.counts) - self.counts
        self._arrays = {
            name: _of(tensors, path, f"{name}.states" if text.length else name) for name, text in kept.items()
        }
        self._tokens = {
            name: np.asarray(_of(tensors, path, f"{name}.tokens")) for name, text in kept.items() if text.length
        }
        self._ends: dict[str, np.ndarray] = {}
        for name, array in self._arrays.items():
            self._check(path, name, array, rows)

    def _check(self, path: Path, name: str, array: np.ndarray, rows: int) -> None:
        captions = int(self.counts.sum())
        if name in self._tokens:
            kept = self._kept[name].kept(self._tokens[name])
            self._ends[name] = np.cumsum(kept)
            if array.ndim != 2 or len(array) != kept.sum():
                raise DataError(str(path), f"holds {array.shape} states of {kept.sum()} tokens", MAKE_AGAIN)
        entries = len(self._tokens.get(name, array))
        if len(self.counts) != rows or entries != captions:
            raise DataError(str(path), f"holds other rows or captions than the {rows} of the index", MAKE_AGAIN)

    def width(self, name: str) -> int:
        """Return the width of a state, or of a vector."""
        return int(self._arrays[name].shape[1])

    def read(self, name: str, row: int, number: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Return states (L, D) float32 and mask (L,) int64 of caption ``number`` of ``row``; or a vector and None."""
        caption, array, length = int(self._first[row]) + number, self._arrays[name], self._kept[name].length
        if not length:
            return array[caption].astype(np.float32), None
        end, tokens = int(self._ends[name][caption]), int(self._tokens[name][caption])
        count = int(self._kept[name].kept(self._tokens[name])[caption])
        states = np.zeros((length, array.shape[1]), np.float32)
        states[:count] = array[end - count : end]
        return states, (np.arange(length) < tokens).astype(np.int64)


class _Shard:
    """Some rows: their latents, and what is kept of their captions."""

    def __init__(self, path: Path, rows: int, index: CacheIndex) -> None:
        tensors = map_tensors(path)
        latents = {name: tensors[name] for name in ("mean", "std", "vector", *index.features) if name in tensors}
        if index.stem == "features":  # of one view, which had no axis
            latents = {name: array[:, None] for name, array in latents.items()}
        self.path, self.latents, self._views = path, latents, index.views
        self._shapes = tensors["latent_shape"] if index.ragged and "latent_shape" in tensors else None
        if index.ragged:
            self._ends = self._checked_ends(rows, index)
        else:
            self._check_stacked(rows, index)
        self.texts = _Texts(path, index.texts, rows)

    def _checked_ends(self, rows: int, index: CacheIndex) -> np.ndarray:
        """Return where the elements of each row end, (rows,) int64; raises DataError where they are not all there."""
        ends = np.cumsum([np.prod(shape) * index.views for shape in self._shapes]) if self._shapes is not None else []
        found = {name: array.shape for name, array in self.latents.items() if name in ("mean", "std")}
        if len(ends) != rows or found != dict.fromkeys(index.moments, (int(ends[-1]),)):
            wanted = f"{' and '.join(index.moments)} of {rows} rows, with latent_shape"
            raise DataError(str(self.path), f"holds {found}, not {wanted}", MAKE_AGAIN)
        return np.asarray(ends, np.int64)

    def _check_stacked(self, rows: int, index: CacheIndex) -> None:
        """Raise DataError unless latents are (rows, views, C, ...) each."""
        shapes = {name: array.shape for name, array in self.latents.items() if name in ("mean", "std")}
        shape = shapes.get("mean", ())
        if len(shape) < 4 or shape[:2] != (rows, index.views) or shapes != dict.fromkeys(index.moments, shape):
            wanted = f"{' and '.join(index.moments)} (({rows}, {index.views}, C, ...) each)"
            raise DataError(str(self.path), f"holds {shapes}, not {wanted}", MAKE_AGAIN)

    @property
    def latent_shapes(self) -> set[tuple[int, ...]]:
        """(C, ...) of the latents."""
        if self._shapes is None:
            return {self.latents["mean"].shape[2:]}
        return {tuple(shape) for shape in np.unique(self._shapes, axis=0).tolist()}

    def latent(self, name: str, place: int, view: int) -> np.ndarray:
        """Return a moment, (C, ...), of a row in a view; or the features of a teacher."""
        if self._shapes is None:
            return self.latents[name][place, view]
        shape = tuple(self._shapes[place].tolist())
        size = math.prod(shape)
        first = int(self._ends[place]) - (self._views - view) * size
        return self.latents[name][first : first + size].reshape(shape)


def _of(tensors: Mapping[str, Any], path: Path, name: str) -> Any:
    if name not in tensors:
        raise DataError(str(path), f"holds no {name}", MAKE_AGAIN)
    return tensors[name]


def first_not_finite(*arrays: np.ndarray) -> int | None:
    """Return the first row, axis 0 of each of ``arrays``, with a number that is infinite or none; None: all good."""
    good = np.logical_and.reduce([np.isfinite(array).all(axis=tuple(range(1, array.ndim))) for array in arrays])
    return None if good.all() else int(np.argmin(good))


_WORDS = {
    "rows": "other samples (how many, and the digest of names, sizes and labels or captions)",
    "pixels": "another size or crop",
    "autoencoder": "another autoencoder, precision or tiling",
    "text_encoder": "another text encoder, tokenizer or precision",
    "text": "another length or padding of texts",
}
_SHA256 = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{52}\b")


def check_same(where: str, found: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    """Raise ConfigError naming the first thing in which a cache differs from what is wanted."""
    for key, here in wanted.items():
        there = found.get(key, "absent")
        if there != here:
            kind = "teacher" if key.startswith("features") else key.partition("[")[0]
            words = _WORDS.get(kind, f"another {kind}")
            a, b = (shown(_SHA256.sub(r"\1", part)) for part in _parts_that_differ(there, here))
            raise ConfigError(
                where, f"was made with {words}: {a} there and {b} here",
                "make a cache of its own, in another folder: mm-dit cache-latents",
            )  # fmt: skip


def _parts_that_differ(there: str, here: str) -> tuple[str, str]:
    """Return of two texts that say several things each, with commas between, what they say otherwise."""
    parts = there.split(", "), here.split(", ")
    if len(parts[0]) != len(parts[1]):
        return there, here
    pairs = [(a, b) for a, b in zip(*parts) if a != b]
    return ", ".join(a for a, _ in pairs), ", ".join(b for _, b in pairs)
