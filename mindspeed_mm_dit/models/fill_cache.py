"""Fill a cache: encode each view of every sample once, and every distinct caption of a shard once.

The ranks write shards in turn. A shard gets its final name only when it is complete; existing shards are kept. The rank
that sees that all shards exist writes the index.
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
from mindspeed_mm_dit.data.cache import ROWS, UNCONDITIONAL_FILE, first_not_finite, open_shard
from mindspeed_mm_dit.data.cache_index import (
    INDEX,
    SOURCES,
    CachedText,
    CacheIndex,
    check_same,
    digest_of_sources,
    source_files,
    sources_json,
)
from mindspeed_mm_dit.data.loader import load_batches
from mindspeed_mm_dit.data.samples import OpenedDataset
from mindspeed_mm_dit.data.sources import VisualReader
from mindspeed_mm_dit.errors import DataError
from mindspeed_mm_dit.framework import ops
from mindspeed_mm_dit.models.autoencoder import to_images
from mindspeed_mm_dit.models.data import cache_identity
from mindspeed_mm_dit.models.frames import frame_features, frame_latents

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
    """Reads batches of pixels by sample index, in all views, with the interface of ``load_batches``."""

    visuals: VisualReader
    views: int

    def batch(self, positions: np.ndarray) -> Arrays:
        """Return pixels (views * B, C, ...) of the samples ``positions`` (B,): all of view 0, then of view 1.

        Conditioning images are returned likewise.
        """
        each = [self.visuals.read(positions, np.full(len(positions), view)).arrays for view in range(self.views)]
        return {name: np.concatenate([arrays[name] for arrays in each]) for name in each[0]}


class CacheWriter:
    """The shards of one cache, on one of ``world_size`` ranks."""

    def __init__(self, folder: Path, opened: OpenedDataset, settings: EncodeSettings) -> None:
        """``opened``: samples that are read from their files; raises ConfigError if there is nothing to cache."""
        self.folder, self.settings, self._opened, rows = folder, settings, opened, opened.rows
        self._visuals = opened.visuals(rows)
        assert self._visuals.views is not None, "cache_identity refuses samples whose pixels differ each time"
        sections = opened.model.text_encoders
        conditions = opened.model.predictor.conditions
        self._texts = [part for text in conditions if isinstance(text, TextCondition) for part in text.parts]
        texts = {c.name: _cached_text(c, sections[c.encoder]) for c in self._texts}
        self._sources = source_files(rows, opened.param.data_folder)
        sources = digest_of_sources(self._sources)
        made_by = {**cache_identity(opened.model, opened.param), "rows": rows.digest, "sources": sources}
        self._conditions = opened.model.predictor.conditions
        names = self._conditions.cached_names(opened.param.extra_images)
        tokens = [name for name in names if name != "frame_mean"]
        self.index = CacheIndex(
            made_by,
            len(rows),
            settings.shard_rows,
            self._visuals.views,
            opened.model.ae.samples_posterior,
            texts,
            rows.skipped,
            rows.classes,
            rows.digest,
            features=(*opened.model.feature_shapes, *tokens),
            ragged=rows.shapes is not None,
            with_frames="frame_mean" in names,
        )
        self._metadata = {
            "made_by": json.dumps(made_by),
            "shard_rows": str(settings.shard_rows),
            "dtype": settings.dtype,
        }
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
        metadata = open_shard(path).metadata() or {}
        try:
            made_by = json.loads(metadata["made_by"])
        except (KeyError, ValueError):
            raise DataError(f"{path} does not record what it was made from. Remove it.") from None
        check_same(str(path), made_by, self.index.made_by)
        for key in ("shard_rows", "dtype"):
            if metadata.get(key) != self._metadata[key]:
                raise DataError(
                    f"{path} was made with {key} {metadata.get(key)}, but this run uses {self._metadata[key]}. Use "
                    "the same settings, or another --output."
                )
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
            arrays = self._encoded_rows(autoencoder, teachers, image_encoder, batch, batch_rows)
            if "vector" in self._opened.rows.items:
                arrays["vector"] = np.asarray(self._opened.rows.items["vector"][batch_rows], np.float32)
            for name, array in arrays.items():
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
        shapes, size, batches = self._opened.rows.shapes, self.settings.batch_size, list[np.ndarray]()
        buckets = np.zeros(len(rows)) if shapes is None else np.unique(shapes[rows], axis=0, return_inverse=True)[1]
        for bucket in np.unique(buckets):
            bucket_rows = rows[buckets.reshape(-1) == bucket]
            batches += np.array_split(bucket_rows, range(size, len(bucket_rows), size))
        return batches

    def _encoded_rows(
        self, autoencoder: Any, teachers: Sequence[Any], image_encoder: Any, batch: Arrays, rows: np.ndarray
    ) -> Arrays:
        """Return what is stored of the latents and features of some rows, each (B, views, ...)."""
        moments = encode_moments(autoencoder, batch["pixels"])
        tensors = {name: ops.tensor(np.ascontiguousarray(array)) for name, array in batch.items()}
        if self.index.with_frames:
            with ops.no_grad():  # raw latents (B, C, F, H, W) of the conditioning frames
                mean = ops.numpy(frame_latents(self._conditions.frames, tensors, autoencoder))
            missing = moments["mean"].shape[2] - mean.shape[2]
            moments["frame_mean"] = np.pad(mean, ((0, 0), (0, 0), (0, missing), (0, 0), (0, 0)))
        arrays = self._by_view({name: moments[name] for name in self.index.moments}, rows, "latents are")
        if teachers:
            images = to_images(tensors["pixels"])
            features = dict(zip(self.index.features, (ops.numpy(teacher(images)) for teacher in teachers)))
            arrays |= self._by_view(features, rows, "features by a teacher are")
        if (tokens := self._conditions.image_tokens) is not None:
            embeds = ops.numpy(frame_features(tokens, tensors, lambda: image_encoder))
            arrays |= self._by_view({"image_embeds": embeds}, rows, "features by the image encoder are")
        return arrays

    def _by_view(self, arrays: Arrays, rows: np.ndarray, what: str) -> Arrays:
        """Return ``arrays``, which have all rows of view 0, then of view 1, as (B, views, ...), rounded."""
        rounded = {
            name: self._rounded(np.stack(np.split(array, self.index.views), 1)) for name, array in arrays.items()
        }
        bad = first_not_finite(*rounded.values())
        if bad is not None:
            raise self._not_finite(int(rows[bad]), what)
        return rounded

    def _captions(self, rows: np.ndarray, text_encoders: Sequence[Any]) -> Arrays:
        """Return the encoded captions of ``rows``; a caption of several rows is encoded once."""
        row_captions = [self._opened.rows.captions[row] for row in rows.tolist()]
        captions = [caption for texts in row_captions for caption in texts]
        numbers = {caption: number for number, caption in enumerate(dict.fromkeys(captions))}
        encoded = self._encoded(list(numbers), text_encoders)
        for name, array in encoded.items():
            if first_not_finite(array) is not None:
                raise self._not_finite(int(rows[0]), f"{name}, or those of a sample after it, are")
        chosen = np.array([numbers[caption] for caption in captions])
        return {"captions": np.array([len(texts) for texts in row_captions]), **self._repeated(encoded, chosen)}

    def _repeated(self, encoded: Arrays, chosen: np.ndarray) -> Arrays:
        """Return the arrays of the captions ``chosen`` (n,) from ``encoded``."""
        repeated: Arrays = {}
        for condition in self._texts:
            name = condition.name
            if name in encoded:
                repeated[name] = encoded[name][chosen]
                continue
            tokens = encoded[f"{name}.tokens"]
            ends = np.cumsum(self.index.texts[name].num_states(tokens))
            states = np.split(encoded[f"{name}.states"], ends[:-1])
            repeated |= {
                f"{name}.tokens": tokens[chosen],
                f"{name}.states": np.concatenate([states[n] for n in chosen]),
            }
        return repeated

    def _encoded(self, captions: Sequence[str], text_encoders: Sequence[Any]) -> Arrays:
        """Return the arrays to store of each caption for each condition, one caption after another."""
        size = self.settings.batch_size
        parts = [self._batch(captions[n : n + size], text_encoders) for n in range(0, len(captions), size)]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _batch(self, captions: Sequence[str], text_encoders: Sequence[Any]) -> Arrays:
        arrays: Arrays = {}
        for condition in self._texts:
            encoded = text_encoders[condition.encoder].encode(captions)
            if not isinstance(condition, TextStates):
                arrays[condition.name] = self._rounded(ops.numpy(encoded.pooled))
                continue
            states, tokens = ops.numpy(encoded.states), ops.numpy(encoded.mask).sum(1).astype(np.int64)
            counts = self.index.texts[condition.name].num_states(tokens).tolist()
            arrays[f"{condition.name}.tokens"] = tokens
            real_states = [state[:count] for state, count in zip(states, counts)]
            arrays[f"{condition.name}.states"] = self._rounded(np.concatenate(real_states))
        return arrays

    def _rounded(self, array: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):  # overflow of fp16 is detected afterwards
            return array.astype(DTYPES[self.settings.dtype])

    def _not_finite(self, row: int, what: str) -> DataError:
        return DataError(
            f"{self._opened.rows.paths[row]} cannot be cached: its {what} not finite in {self.settings.dtype}. Use "
            "--dtype fp32, and dtype fp32 of ae and text_encoder; if that does not help, the weights are damaged."
        )

    def finish(self, text_encoders: Callable[[], Sequence[Any]]) -> bool:
        """Write the empty caption, the rows and the index if every shard exists; return whether it does.

        text_encoders: loads them; called if the empty caption does not exist yet.
        """
        if not all(self.index.shard_path(self.folder, shard).exists() for shard in range(self.index.num_shards)):
            return False
        if self._texts and not self._is_there(self.folder / UNCONDITIONAL_FILE):
            unconditional = self._encoded([""], text_encoders())
            replace_file(
                self.folder / UNCONDITIONAL_FILE, lambda aside: save_file(unconditional, aside, self._metadata)
            )
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
    ordered = {name: [samples[n] for n in order.tolist()] for name, samples in rows.items()}
    flat = {
        name: np.stack(samples) if name == "image_embeds" else np.concatenate([x.reshape(-1) for x in samples])
        for name, samples in ordered.items()
    }
    return {**flat, "latent_shape": np.array([mean.shape[1:] for mean in ordered["mean"]], np.int64)}


def _cached_text(condition: Any, section: Any) -> CachedText:
    return CachedText(section.max_length, section.zero_padding) if isinstance(condition, TextStates) else CachedText()


def encode_moments(autoencoder: Any, pixels: np.ndarray) -> Arrays:
    """Return "mean" and, if there is one, "std" (B, C, ...) float32 of the latents of pixels (B, 3 or 1, ...)."""
    with ops.no_grad():
        images = to_images(ops.tensor(np.ascontiguousarray(pixels)))
        moments = zip(("mean", "std"), autoencoder.moments(images))
        return {name: ops.numpy(moment) for name, moment in moments if moment is not None}
