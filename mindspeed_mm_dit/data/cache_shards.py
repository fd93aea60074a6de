"""The shards of a cache: latents, features and encoded captions of some rows, mapped into memory."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from mindspeed_mm_dit.configs.files import UnusableFile, check_file
from mindspeed_mm_dit.data.cache_before import names_of_before
from mindspeed_mm_dit.data.cache_index import CachedText, CacheIndex
from mindspeed_mm_dit.errors import DataError

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
