"""Several data sets as one source: their rows concatenated, and their reader; ``MixedOrder`` is in ``order.py``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.data import MixedParam
from mindspeed_mm_dit.configs.source import SourceParam
from mindspeed_mm_dit.data.buckets import bucket_report
from mindspeed_mm_dit.data.sources import ReadSamples, Rows, Source, SourceRequest, VisualReader, source_of
from mindspeed_mm_dit.errors import ConfigError


class Origins:
    """The source of each row, and its index there: ``facts`` of mixed rows."""

    def __init__(self, parts: Sequence[Rows], source: np.ndarray, number: np.ndarray) -> None:
        self.parts, self.source, self.number = parts, source, number

    def subset(self, rows: np.ndarray) -> Origins:
        """Return the origins of the rows numbered ``rows`` (n,)."""
        return Origins(self.parts, self.source[rows], self.number[rows])

    def members(self) -> list[np.ndarray]:
        """Return the numbers of each source's rows."""
        return [np.flatnonzero(self.source == source) for source in range(len(self.parts))]


def rows_by_source(rows: Rows) -> list[Rows]:
    """Return the rows of each source, with their shapes there; rows of a single source are returned unchanged."""
    origins = rows.facts
    if not isinstance(origins, Origins):
        return [rows]
    return [part.subset(origins.number[members]) for part, members in zip(origins.parts, origins.members())]


def source_sections(param: SourceParam) -> list[tuple[str, SourceParam]]:
    """Return the name of each source in data.json and its section; a data set that is not a mix is its only source."""
    if isinstance(param, MixedParam):
        return [(f"dataset_param.sources[{number}]", source) for number, source in enumerate(param.sources)]
    return [("dataset_param", param)]


def missing_skip_settings(rows: Rows, param: SourceParam) -> list[str]:
    """Return the skip settings to turn on for a run to pass its unusable rows; empty if none are missing."""
    return [
        source.skip_key.replace("dataset_param", where)
        for (where, source), part in zip(source_sections(param), rows_by_source(rows))
        if part.skipped and not source.skip_bad
    ]


def concat_rows(param: MixedParam, items: tuple[str, ...], parts: Sequence[Rows]) -> Rows:
    """Concatenate the rows of all sources.

    Raises:
        ConfigError: their classes differ.
    """
    for part, source in zip(parts, param.sources):
        if "label" in items and part.classes != parts[0].classes:
            raise ConfigError(
                f"dataset_param.sources have different classes: {source.where} has {', '.join(part.classes[:10])}, and "
                f"the first source {', '.join(parts[0].classes[:10])}. Name the classes of all sources alike."
            )
    parts = [
        replace(part, shapes=np.tile(source.sample_size, (len(part), 1))) if part.shapes is None else part
        for part, source in zip(parts, param.sources)
    ]
    axes = len(param.sample_size)
    counts = [len(part) for part in parts]
    sizes = [part.sizes for part in parts]
    return Rows(
        tuple(path for part in parts for path in part.paths),
        {item: _stacked([part.items[item] for part in parts]) for item in items},
        parts[0].classes,
        sum(part.skipped for part in parts),
        tuple(problem for part in parts for problem in part.problems),
        tuple(note for part in parts for note in part.notes),
        "; ".join(part.digest for part in parts),
        Origins(parts, np.repeat(np.arange(len(parts)), counts), np.concatenate([np.arange(n) for n in counts])),
        np.concatenate([_with_axes(part.shapes, axes) for part in parts]),
        None if any(size is None for size in sizes) else np.concatenate([_with_axes(size, axes) for size in sizes]),
    )


def _with_axes(shapes: Any, axes: int) -> np.ndarray:
    """Return shapes (N, 2 or 3) as (N, axes); an image has one frame."""
    return np.pad(shapes, ((0, 0), (axes - shapes.shape[1], 0)), constant_values=1)


def _stacked(columns: list[Any]) -> Any:
    if isinstance(columns[0], np.ndarray):
        return np.concatenate(columns)
    return tuple(entry for column in columns for entry in column)


class MixedReader:
    """Reads rows of several sources (``VisualReader``), each by its reader; views have a column per source."""

    views = None

    def __init__(self, rows: Rows, readers: Sequence[VisualReader], image_names: Iterable[str] = ()) -> None:
        """``image_names``: images that come with samples; a sample without them uses its first and last frame."""
        self._source, self._readers, self._image_names = rows.facts.source, readers, tuple(image_names)
        self._members = rows.facts.members()
        self._local_rows = np.empty(len(rows), np.int64)
        for members in self._members:
            self._local_rows[members] = np.arange(len(members))
        self._axes = 2 + (0 if rows.shapes is None else rows.shapes.shape[1])

    def views_at(self, seed: int, sample_indices: np.ndarray) -> np.ndarray:
        """Return the view of each sample in each source, (B, sources)."""
        return np.stack([reader.views_at(seed, sample_indices) for reader in self._readers], 1)

    def read(self, rows: np.ndarray, views: np.ndarray) -> ReadSamples:
        """Return the pixels of ``rows`` (B,), all of one shape; as videos if any source has videos."""
        pixels: list[Any] = [None] * len(rows)
        named_images: dict[str, list[Any]] = {name: [None] * len(rows) for name in self._image_names}
        row_indices = rows.copy()
        for source in np.unique(self._source[rows]).tolist():
            positions = np.flatnonzero(self._source[rows] == source)
            read = self._readers[source].read(self._local_rows[rows[positions]], views[positions, source])
            row_indices[positions] = self._members[source][read.rows]
            for position, sample in zip(positions.tolist(), read.arrays["pixels"]):
                pixels[position] = sample if sample.ndim + 1 == self._axes else sample[:, None]
            for name, images in named_images.items():
                frame = -1 if name.startswith("last") else 0
                frames = [pixels[position][:, frame] for position in positions.tolist()]
                for position, image in zip(positions.tolist(), read.arrays.get(name, frames)):
                    images[position] = image
        arrays = {name: np.stack(images) for name, images in named_images.items()}
        return ReadSamples({"pixels": np.stack(pixels), **arrays}, row_indices)


def mixed_lines(rows: Rows, param: SourceParam) -> list[str]:
    """Return the lines a run prints about its buckets, per source if there are several."""
    parts = [part for part in rows_by_source(rows) if part.shapes is not None]
    bucket_lines = [bucket_report(part.shapes[part.entries], param.bucket_group) for part in parts]  # type: ignore[index]
    if not isinstance(param, MixedParam):
        return [line for source_lines in bucket_lines for line in source_lines]
    return [
        f"source    {source.where}: {weight / sum(param.weights):.1%} of a run\n{source_lines[0]}"
        for source, weight, source_lines in zip(param.sources, param.weights, bucket_lines)
    ]


def _open(param: MixedParam, request: SourceRequest) -> Rows:
    parts = [source_of(source).open(source, request) for source in param.sources]
    return concat_rows(param, request.items or param.items, parts)


def _reader(rows: Rows, param: MixedParam, channels: int) -> MixedReader:
    pairs = zip(param.sources, rows_by_source(rows))
    readers = [source_of(source).visuals(part, source, channels) for source, part in pairs]
    return MixedReader(rows, readers, param.extra_images)


def _provide(param: MixedParam) -> None:
    for source in param.sources:
        source_of(source).provide(source)


MIXED = Source(MixedParam, _open, _reader, _provide)
