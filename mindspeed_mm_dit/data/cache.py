"""A cache of encoded samples on disk, with everything a run must agree on to use it. No framework.

    index.json               what the cache was made from and with, rows per shard; written last (cache_index.py)
    rows.jsonl               path, label and captions of every row, in order
    null.safetensors         the encoded empty caption of each text condition
    sources.jsonl            the files that the rows were read from, with size, time and digest (cache_index.py)
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

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from mindspeed_mm_dit.configs.files import UnusableFile, check_file, error_text, read_bytes
from mindspeed_mm_dit.data.cache_index import INDEX, RESUMES, CachedText, CacheIndex, read_index
from mindspeed_mm_dit.data.conditions import NO_CAPTION
from mindspeed_mm_dit.data.labels import names_for_labels
from mindspeed_mm_dit.data.sources import ReadSamples, Rows
from mindspeed_mm_dit.errors import ConfigError, DataError

ROWS, UNCONDITIONAL_FILE = "rows.jsonl", "null.safetensors"
MAKE_AGAIN = "Remove it and run mm-dit cache-latents again, which keeps the other shards."
_MOMENTS = ("mean", "std", "frame_mean")

Arrays = dict[str, np.ndarray]


def open_shard(path: Path) -> Any:
    """Return an open safetensors file, of which only what is read comes into memory; raises DataError if damaged."""
    try:
        check_file(path)
        file = safe_open(path, "numpy")  # (it compares the header with the size of the file)
        kinds = {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
        if not kinds <= {"F32", "F16", "I64"}:
            raise UnusableFile(f"has tensors of {', '.join(sorted(kinds))}, and those of a cache are F16, F32 and I64")
        return file
    except UnusableFile as problem:
        raise DataError(f"{path} {problem}. {MAKE_AGAIN}") from None
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} is not a shard of a cache: {error_text(error)}. {MAKE_AGAIN}") from None


def _shape_of(tensor: Any) -> tuple[int, ...]:
    return tuple(tensor.get_shape())


class Texts:
    """The encoded captions of some rows, one caption after another."""

    def __init__(self, path: Path, file: Any, texts: Mapping[str, CachedText], rows: int) -> None:
        """``file``: an open shard, or that of the empty caption."""
        self._texts, names = texts, set(file.keys())
        states = {name: f"{name}.states" if text.length else name for name, text in texts.items()}
        tokens = {name: f"{name}.tokens" for name, text in texts.items() if text.length}
        if missing := sorted({*states.values(), *tokens.values()} - names):
            raise DataError(f"{path} has no tensor {missing[0]}. {MAKE_AGAIN}")
        self.counts = file.get_tensor("captions") if "captions" in names else np.ones(rows, np.int64)
        self._first = np.cumsum(self.counts) - self.counts
        self._arrays = {name: file.get_slice(tensor) for name, tensor in states.items()}
        self._tokens = {name: file.get_tensor(tensor) for name, tensor in tokens.items()}
        num_states = {name: texts[name].num_states(counts) for name, counts in self._tokens.items()}
        self._ends = {name: np.cumsum(counts) for name, counts in num_states.items()}
        for name, array in self._arrays.items():
            shape, entries = _shape_of(array), len(self._tokens.get(name, ()))
            if name in tokens and (len(shape) != 2 or shape[0] != num_states[name].sum()):
                raise DataError(f"{path} has states of shape {shape} for {num_states[name].sum()} tokens. {MAKE_AGAIN}")
            if len(self.counts) != rows or (entries if name in tokens else shape[0]) != self.counts.sum():
                raise DataError(f"{path} does not have the captions of the {rows} rows in {INDEX}. {MAKE_AGAIN}")

    def width(self, name: str) -> int:
        """Return the width of a state, or of a vector."""
        return _shape_of(self._arrays[name])[1]

    def read(self, name: str, row: int, number: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Return states (L, D) float32 and mask (L,) int64 of caption ``number`` of ``row``; or a vector and None."""
        caption, array, length = int(self._first[row]) + number, self._arrays[name], self._texts[name].length
        if not length:
            return array[caption].astype(np.float32), None
        end, tokens = int(self._ends[name][caption]), int(self._tokens[name][caption])
        count = int(self._texts[name].num_states(self._tokens[name])[caption])
        states = np.zeros((length, self.width(name)), np.float32)
        states[:count] = array[end - count : end]
        return states, (np.arange(length) < tokens).astype(np.int64)


class Shard:
    """Some rows: their latents and their encoded captions."""

    def __init__(self, path: Path, rows: int, index: CacheIndex) -> None:
        file = open_shard(path)
        names = set(file.keys())
        self._views = index.views
        self.latents = {n: file.get_slice(n) for n in (*_MOMENTS, "vector", *index.features) if n in names}
        self._shapes = file.get_tensor("latent_shape") if index.ragged and "latent_shape" in names else None
        shapes = {name: _shape_of(array) for name, array in self.latents.items() if name in _MOMENTS}
        if index.ragged:
            sizes = [] if self._shapes is None else self._shapes.prod(1) * index.views
            self._ends = np.cumsum(sizes, dtype=np.int64)
            is_right = len(sizes) == rows and shapes == dict.fromkeys(index.moments, (int(self._ends[-1]),))
            expected = f"{' and '.join(index.moments)} of {rows} rows, with latent_shape"
        else:
            shape = shapes.get("mean", ())
            is_right = shape[:2] == (rows, index.views) and shapes == dict.fromkeys(index.moments, shape)
            is_right = is_right and len(shape) >= 4
            expected = f"{' and '.join(index.moments)} (({rows}, {index.views}, C, ...) each)"
        if not is_right:
            raise DataError(f"{path} has tensors of shapes {shapes}, not {expected}. {MAKE_AGAIN}")
        self.texts = Texts(path, file, index.texts, rows)

    @property
    def latent_shapes(self) -> set[tuple[int, ...]]:
        """Shapes (C, ...) of the latents."""
        if self._shapes is None:
            return {_shape_of(self.latents["mean"])[2:]}
        return {tuple(shape) for shape in np.unique(self._shapes, axis=0).tolist()}

    def vectors(self) -> np.ndarray:
        """Return the vector of each row, (rows, width)."""
        return self.latents["vector"][:]

    def latent(self, name: str, position: int, view: int) -> np.ndarray:
        """Return a moment (C, ...) of a row in a view, or the features of a teacher or an image encoder."""
        if self._shapes is None or name not in _MOMENTS:
            return self.latents[name][position, view]
        shape = tuple(self._shapes[position].tolist())
        size = math.prod(shape)
        first = int(self._ends[position]) - (self._views - view) * size
        return self.latents[name][first : first + size].reshape(shape)


def first_not_finite(*arrays: np.ndarray) -> int | None:
    """Return the first row (axis 0 of all ``arrays``) with a value that is not finite; None if all are finite."""
    good = np.logical_and.reduce([np.isfinite(array).all(axis=tuple(range(1, array.ndim))) for array in arrays])
    return None if good.all() else int(np.argmin(good))


class Cache:
    """A complete cache, memory-mapped; safe to read from several threads and processes.

    ``setting``: the key of data.json that names it. Raises DataError if it is missing or damaged.
    """

    def __init__(self, folder: str | Path, setting: str) -> None:
        self.folder, self.setting = Path(folder), setting
        self.index = read_index(self.folder, setting)
        path = self.folder / UNCONDITIONAL_FILE
        self._null = Texts(path, open_shard(path), self.index.texts, 1) if self.index.texts else None
        self._shards = [
            Shard(self.index.shard_path(self.folder, shard), len(self.index.rows_of(shard)), self.index)
            for shard in range(self.index.num_shards)
        ]

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
            for shard in self._shards:
                actual = _shape_of(shard.latents[name])[2:] if name in shard.latents else None
                if actual != shape:
                    found = f"no {name}" if actual is None else f"{name} of shape {actual}"
                    raise ConfigError(
                        f"{what} has {found}, but the predictor takes {name} of shape {shape}. Correct "
                        "predictor.z_dims, or make another cache."
                    )

    def rows(self, data_folder: str) -> Rows:
        """Return the rows, with paths below ``data_folder``; raises DataError if their list is damaged."""
        entries, index = self._listed(), self.index
        items: dict[str, Any] = {}
        if all("label" in row for row in entries):
            items["label"] = np.array([row["label"] for row in entries], np.int64)
        if all("vector" in shard.latents for shard in self._shards):
            items["vector"] = np.concatenate([shard.vectors() for shard in self._shards])
        if index.texts:
            counts = np.concatenate([shard.texts.counts for shard in self._shards]).tolist()
            numbered = ([f"caption {n}" for n in range(count)] for count in counts)  # (for rows without texts)
            items["caption"] = tuple(tuple(row.get("captions") or names) for row, names in zip(entries, numbered))
        classes = index.classes
        if not classes and "label" in items:
            classes = names_for_labels((), items["label"])
        paths = tuple(str(Path(data_folder, row["path"])) for row in entries)
        shapes = np.array([row["shape"] for row in entries], np.int64) if index.ragged else None
        numbers = np.arange(len(paths))
        return Rows(paths, items, classes, index.skipped, digest=index.digest, shapes=shapes, cached=numbers)

    @property
    def knows_captions(self) -> bool:
        """Whether the cache has the captions as text."""
        return all("captions" in row for row in self._listed())

    def _listed(self) -> list[dict[str, Any]]:
        try:
            entries = [json.loads(line) for line in read_bytes(self.folder / ROWS).splitlines()]
            if len(entries) != self.index.num_rows or not all(isinstance(row.get("path"), str) for row in entries):
                raise UnusableFile(f"lists {len(entries)} rows, but {INDEX} counts {self.index.num_rows}")
        except UnusableFile as problem:
            raise DataError(f"{self.folder / ROWS} {problem}. {RESUMES}") from None
        except (ValueError, AttributeError) as error:
            raise DataError(f"{self.folder / ROWS} cannot be read: {error_text(error)}. {RESUMES}") from None
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
        assert self._null is not None, "a cache of texts has the empty caption"
        texts = []
        for row, number in zip(rows.tolist(), numbers.tolist()):
            shard, position = divmod(row, self.index.shard_rows)
            is_empty = number == NO_CAPTION
            source = self._null if is_empty else self._shards[shard].texts
            texts.append(source.read(name, *((0, 0) if is_empty else (position, number))))
        batch = {name: np.stack([states for states, _ in texts])}
        self._check_finite(batch, rows)
        masks = [mask for _, mask in texts if mask is not None]
        return {**batch, f"{name}_mask": np.stack(masks)} if masks else batch

    def _check_finite(self, arrays: Mapping[str, np.ndarray], rows: np.ndarray) -> None:
        bad = first_not_finite(*arrays.values())
        if bad is not None:
            row = int(rows[bad])
            path = self.index.shard_path(self.folder, row // self.index.shard_rows)
            raise DataError(
                f"{path} has a value that is not finite in row {row}, {self._listed()[row]['path']}. {MAKE_AGAIN}"
            )


class CachedVisualReader:
    """Reads the latents of cached rows, with the interface of the readers of files (``VisualReader``)."""

    def __init__(self, cache: Cache, rows: Rows, file_reader: Any, with_std: bool, others: Sequence[str] = ()) -> None:
        """``file_reader``: the reader of the rows' files, which decides the views.

        others: names of the features and of the latents of conditioning frames to read.
        """
        self.views, self.views_at, self._cache, self._rows = cache.index.views, file_reader.views_at, cache, rows
        self._with_std, self._others = with_std, others

    def read(self, rows: np.ndarray, views: np.ndarray) -> ReadSamples:
        """Return latent_mean and, for a sampled posterior, latent_std, each (B, C, ...) float32, unscaled."""
        assert self._rows.cached is not None, "rows of a cache have their indices in it"
        arrays = self._cache.read_latents(self._rows.cached[rows], views)
        names = ("mean", "std") if self._with_std else ("mean",)
        latents = {f"latent_{name}": arrays[name] for name in names}
        return ReadSamples(latents | {name: arrays[name] for name in self._others}, rows)
