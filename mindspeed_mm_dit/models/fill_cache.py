"""Fills a cache: encodes each view of every sample once, and every caption once per shard, even if samples share it.

The ranks take shards in turn. A shard gets its name only when it is complete, and an existing shard is not made again.
The rank that finds all shards present writes the index.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from mindspeed_mm_dit.configs.condition import TextCondition, TextStates
from mindspeed_mm_dit.configs.files import replace_file
from mindspeed_mm_dit.data.cache import NULL, ROWS
from mindspeed_mm_dit.data.cache_index import INDEX, CachedText, CacheIndex, check_same
from mindspeed_mm_dit.data.cache_shards import first_not_finite, metadata_of
from mindspeed_mm_dit.data.cache_sources import SOURCES, digest_of_sources, source_files, sources_json
from mindspeed_mm_dit.data.loader import load_batches
from mindspeed_mm_dit.data.rows import Visuals
from mindspeed_mm_dit.data.samples import Opened
from mindspeed_mm_dit.errors import DataError
from mindspeed_mm_dit.framework import ops
from mindspeed_mm_dit.models.data import made_by
from mindspeed_mm_dit.models.frames import features_of_frames, mean_of_frames
from mindspeed_mm_dit.models.pixels import to_images

DTYPES = {"fp32": np.float32, "fp16": np.float16}

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class EncodeSettings:
    """Settings for filling a cache."""

    batch_size: int = 16
    """Samples encoded together."""
    shard_rows: int = 4096
    """Samples per file."""
    dtype: str = "fp32"
    """Precision on disk: fp32, or fp16 at half the size."""
    num_workers: int = 2
    """Threads that decode samples ahead."""


@dataclass(frozen=True)
class _Pixels:
    """Reads batches of pixels by row, in all views, with the interface of ``load_batches``."""

    visuals: Visuals
    views: int

    def batch(self, positions: np.ndarray) -> Arrays:
        """Return pixels (views * B, C, ...) of the rows ``positions`` (B,): all of view 0, then of view 1.

        And the images beside them, likewise.
        """
        each = [self.visuals.read(positions, np.full(len(positions), view)).arrays for view in range(self.views)]
        return {name: np.concatenate([arrays[name] for arrays in each]) for name in each[0]}


class CacheWriter:
    """The shards of one cache, on one of ``world_size`` ranks."""

    def __init__(self, folder: Path, opened: Opened, settings: EncodeSettings) -> None:
        """``opened``: samples that are read from their files; raises ConfigError if there is nothing to cache."""
        self.folder, self.settings, self._opened, rows = folder, settings, opened, opened.rows
        self._visuals = opened.visuals(rows)
        assert self._visuals.views is not None, "made_by refuses samples whose pixels differ each time"
        sections = opened.model.text_encoders
        conditions = opened.model.predictor.conditions
        self._texts = [part for own in conditions if isinstance(own, TextCondition) for part in own.parts]
        kept = {c.name: _kept_text(c, sections[c.encoder]) for c in self._texts}
        self._sources = source_files(rows, opened.param.data_folder)
        sources = digest_of_sources(self._sources)
        found = {**made_by(opened.model, opened.param), "rows": rows.digest, "sources": sources}
        self._conditions = opened.model.predictor.conditions
        names = self._conditions.cached_names(opened.param.beside)
        frames, tokens = ([name for name in names if (name == "frame_mean") is of] for of in (True, False))
        self.index = CacheIndex(
            found, len(rows), settings.shard_rows, self._visuals.views, opened.model.ae.samples_posterior, kept,
            rows.skipped, rows.classes, rows.digest, features=(*opened.model.feature_shapes, *tokens),
            ragged=rows.shapes is not None, with_frames=frames == ["frame_mean"],
        )  # fmt: skip
        self._metadata = {
            "made_by": json.dumps(found), "shard_rows": str(settings.shard_rows), "dtype": settings.dtype,
        }  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)

    def missing(self, rank: int, world_size: int) -> list[int]:
        """Return the shards this rank still has to make.

        Raises:
            ConfigError: an existing shard was made from other samples or with other encoders.
            DataError: it is damaged, or was made with other settings.
        """
        shards = range(rank, self.index.num_shards, world_size)
        return [shard for shard in shards if not self._is_there(self.index.shard_path(self.folder, shard))]

    def _is_there(self, path: Path) -> bool:
        if not path.exists():
            return False
        metadata = metadata_of(path)
        try:
            found = json.loads(metadata["made_by"])
        except (KeyError, ValueError):
            raise DataError(str(path), "does not record what it was made from", "remove it") from None
        check_same(str(path), found, self.index.made_by)
        for key in ("shard_rows", "dtype"):
            if metadata.get(key) != self._metadata[key]:
                raise DataError(
                    str(path), f"was made with {key} {metadata.get(key)}, and this run asks for {self._metadata[key]}",
                    "use the same settings, or another --output",
                )  # fmt: skip
        return True

    def write(
        self,
        shard: int,
        autoencoder: Any,
        text_encoders: Sequence[Any],
        teachers: Sequence[Any],
        image_encoder: Any,
        on_rows: Callable[[int], None],
    ) -> None:
        """Encode the samples of ``shard`` and write them; calls ``on_rows`` with the number of samples of each batch.

        Raises:
            DataError: the output for a sample or a caption is not finite, or the shard cannot be written.
        """
        parts: dict[str, list[np.ndarray]] = {}
        rows = np.array(self.index.rows_of(shard), np.int64)
        batches = self._batches(rows)
        reader = _Pixels(self._visuals, self.index.views)
        for batch_rows, batch in zip(batches, load_batches(reader, batches, self.settings.num_workers, 4)):
            latents = self._latents(autoencoder, batch, batch_rows)
            features = self._features(teachers, batch["pixels"], batch_rows)
            features |= self._image_features(image_encoder, batch, batch_rows)
            for name, array in {**latents, **features, **self._vectors(batch_rows)}.items():
                parts.setdefault(name, []).append(array)
            on_rows(len(batch_rows))
        if self.index.ragged:
            tensors = _ragged(parts, np.argsort(np.concatenate(batches)))
        else:
            tensors = {name: np.concatenate(arrays) for name, arrays in parts.items()}
        if self._texts:
            tensors |= self._captions(rows, text_encoders)
        path = self.index.shard_path(self.folder, shard)
        replace_file(path, lambda aside: save_file(tensors, aside, self._metadata))

    def _batches(self, rows: np.ndarray) -> list[np.ndarray]:
        """Return ``rows`` as batches, each of one shape."""
        shapes, size, found = self._opened.rows.shapes, self.settings.batch_size, list[np.ndarray]()
        buckets = np.zeros(len(rows)) if shapes is None else np.unique(shapes[rows], axis=0, return_inverse=True)[1]
        for bucket in np.unique(buckets):
            of_bucket = rows[buckets.reshape(-1) == bucket]
            found += np.array_split(of_bucket, range(size, len(of_bucket), size))
        return found

    def _latents(self, autoencoder: Any, batch: Arrays, rows: np.ndarray) -> Arrays:
        """Return the moments that are kept of some rows, each (B, views, C, ...)."""
        moments = encode_moments(autoencoder, batch["pixels"])
        if self.index.with_frames:
            moments["frame_mean"] = self._frame_mean(autoencoder, batch, moments["mean"].shape[2])
        return self._of_views({name: moments[name] for name in self.index.moments}, rows, "latents are")

    def _frame_mean(self, autoencoder: Any, batch: Arrays, frames: int) -> np.ndarray:
        """Return the raw latents (B, C, F, H, W) of given frames; zeros after them if they are of one frame alone."""
        with ops.no_grad():
            tensors = {name: ops.tensor(np.ascontiguousarray(array)) for name, array in batch.items()}
            found = ops.numpy(mean_of_frames(self._conditions.frames, tensors, autoencoder))
        return np.pad(found, ((0, 0), (0, 0), (0, frames - found.shape[2]), (0, 0), (0, 0)))

    def _image_features(self, image_encoder: Any, batch: Arrays, rows: np.ndarray) -> Arrays:
        """Return an image encoder's features of the frames given to some rows, (B, views, L, width)."""
        if (tokens := self._conditions.image_tokens) is None:
            return {}
        tensors = {name: ops.tensor(np.ascontiguousarray(array)) for name, array in batch.items()}
        found = ops.numpy(features_of_frames(tokens, tensors, lambda: image_encoder))
        return self._of_views({"image_embeds": found}, rows, "features by the image encoder are")

    def _features(self, teachers: Sequence[Any], pixels: np.ndarray, rows: np.ndarray) -> Arrays:
        """Return each teacher's features of some rows, each (B, views, N, width)."""
        if not teachers:
            return {}
        images = to_images(ops.tensor(np.ascontiguousarray(pixels)))
        arrays = [ops.numpy(teacher(images)) for teacher in teachers]
        return self._of_views(dict(zip(self.index.features, arrays)), rows, "features by a teacher are")

    def _of_views(self, arrays: Arrays, rows: np.ndarray, what: str) -> Arrays:
        """Return ``arrays``, which hold all rows of view 0, then of view 1, as (B, views, ...), rounded."""
        found = {name: self._rounded(np.stack(np.split(array, self.index.views), 1)) for name, array in arrays.items()}
        bad = first_not_finite(*found.values())
        if bad is not None:
            raise self._not_finite(int(rows[bad]), what)
        return found

    def _vectors(self, rows: np.ndarray) -> Arrays:
        vectors = self._opened.rows.items.get("vector")
        return {} if vectors is None else {"vector": np.asarray(vectors[rows], np.float32)}

    def _captions(self, rows: np.ndarray, text_encoders: Sequence[Any]) -> Arrays:
        """Return the encoded captions of ``rows``; a caption that several rows share is encoded once."""
        of_rows = [self._opened.rows.captions[row] for row in rows.tolist()]
        captions = [caption for some in of_rows for caption in some]
        places = {caption: place for place, caption in enumerate(dict.fromkeys(captions))}
        encoded = self._encoded(list(places), text_encoders)
        for name, array in encoded.items():
            if first_not_finite(array) is not None:
                raise self._not_finite(int(rows[0]), f"{name}, or those of a sample after it, are")
        chosen = np.array([places[caption] for caption in captions])
        return {"captions": np.array([len(some) for some in of_rows]), **self._repeated(encoded, chosen)}

    def _repeated(self, encoded: Arrays, chosen: np.ndarray) -> Arrays:
        """Return the arrays of the captions ``chosen`` (n,) from ``encoded``."""
        found: Arrays = {}
        for condition in self._texts:
            name = condition.name
            if name in encoded:
                found[name] = encoded[name][chosen]
                continue
            tokens = encoded[f"{name}.tokens"]
            ends = np.cumsum(self.index.texts[name].num_states(tokens))
            states = np.split(encoded[f"{name}.states"], ends[:-1])
            found |= {f"{name}.tokens": tokens[chosen], f"{name}.states": np.concatenate([states[n] for n in chosen])}
        return found

    def _encoded(self, captions: Sequence[str], text_encoders: Sequence[Any]) -> Arrays:
        """Return the arrays to keep of each caption for each condition, one caption after another."""
        size = self.settings.batch_size
        parts = [self._batch(captions[n : n + size], text_encoders) for n in range(0, len(captions), size)]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _batch(self, captions: Sequence[str], text_encoders: Sequence[Any]) -> Arrays:
        found: Arrays = {}
        for condition in self._texts:
            encoded = text_encoders[condition.encoder].encode(captions)
            if not isinstance(condition, TextStates):
                found[condition.name] = self._rounded(ops.numpy(encoded.pooled))
                continue
            states, tokens = ops.numpy(encoded.states), ops.numpy(encoded.mask).sum(1).astype(np.int64)
            counts = self.index.texts[condition.name].num_states(tokens).tolist()
            found[f"{condition.name}.tokens"] = tokens
            kept = [state[:count] for state, count in zip(states, counts)]
            found[f"{condition.name}.states"] = self._rounded(np.concatenate(kept))
        return found

    def _rounded(self, array: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):  # overflow of fp16 is detected afterwards
            return array.astype(DTYPES[self.settings.dtype])

    def _not_finite(self, row: int, what: str) -> DataError:
        return DataError(
            self._opened.rows.paths[row],
            f"its {what} not finite (on disk {self.settings.dtype})",
            "use --dtype fp32 and dtype fp32 of ae and text_encoder; if that does not help, the weights are damaged",
        )

    def finish(self, text_encoders: Callable[[], Sequence[Any]]) -> bool:
        """Write the empty caption, the rows and the index if every shard exists; return whether that is so.

        text_encoders: loads them, called if the empty caption does not exist yet.
        """
        if not all(self.index.shard_path(self.folder, shard).exists() for shard in range(self.index.num_shards)):
            return False
        if self._texts and not self._is_there(self.folder / NULL):
            unconditional = self._encoded([""], text_encoders())
            replace_file(self.folder / NULL, lambda aside: save_file(unconditional, aside, self._metadata))
        lines = "".join(json.dumps(row) + "\n" for row in self._rows())
        replace_file(self.folder / ROWS, lambda aside: aside.write_text(lines, encoding="utf-8"))
        replace_file(self.folder / SOURCES, lambda aside: aside.write_text(sources_json(self._sources)))
        index = json.dumps(asdict(self.index), indent=1) + "\n"
        replace_file(self.folder / INDEX, lambda aside: aside.write_text(index, encoding="utf-8"))
        return True

    def _rows(self) -> Iterator[dict[str, Any]]:
        rows, folder = self._opened.rows, self._opened.param.data_folder
        for number, path in enumerate(rows.paths):
            row: dict[str, Any] = {"path": os.path.relpath(path, folder)}
            if rows.shapes is not None:
                row["shape"] = rows.shapes[number].tolist()
            if "label" in rows.items:
                row["label"] = int(rows.labels[number])
            if "caption" in rows.items:
                row["captions"] = list(rows.captions[number])
            yield row


def _ragged(parts: dict[str, list[np.ndarray]], order: np.ndarray) -> Arrays:
    """Flatten and concatenate arrays (B, views, C, ...) of several shapes in ``order``; add the shape of each row.

    Features of an image encoder have one shape, and are only put in order.
    """
    rows = {name: [row for array in arrays for row in array] for name, arrays in parts.items()}
    found = {
        name: np.stack([own[n] for n in order.tolist()]) if name == "image_embeds"
        else np.concatenate([own[n].reshape(-1) for n in order.tolist()])
        for name, own in rows.items()
    }  # fmt: skip
    return {**found, "latent_shape": np.array([rows["mean"][n].shape[1:] for n in order.tolist()], np.int64)}


def _kept_text(condition: Any, section: Any) -> CachedText:
    return CachedText(section.max_length, section.zero_padding) if isinstance(condition, TextStates) else CachedText()


def encode_moments(autoencoder: Any, pixels: np.ndarray) -> Arrays:
    """Return "mean" and, if there is one, "std" (B, C, ...) float32 of the latents of pixels (B, 3 or 1, ...)."""
    with ops.no_grad():
        images = to_images(ops.tensor(np.ascontiguousarray(pixels)))
        moments = zip(("mean", "std"), autoencoder.moments(images))
        return {name: ops.numpy(moment) for name, moment in moments if moment is not None}
