"""Several data sets as one: their rows concatenated, their reader, and an order that mixes them by weight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.data import MixedParam
from mindspeed_mm_dit.configs.source import SourceParam
from mindspeed_mm_dit.data.buckets import BucketOrder, lines
from mindspeed_mm_dit.data.order import Order, RepeatedOrder, SampleOrder, Stream, generator
from mindspeed_mm_dit.data.rows import Read, Rows, Visuals
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


def parts_of(rows: Rows) -> list[Rows]:
    """Return the rows of each source, with their shapes there; rows of a single source are returned unchanged."""
    origins = rows.facts
    if not isinstance(origins, Origins):
        return [rows]
    return [part.subset(origins.number[members]) for part, members in zip(origins.parts, origins.members())]


def sections(param: SourceParam) -> list[tuple[str, SourceParam]]:
    """Return the name of each source in data.json and its section; a data set that is not a mix is its only source."""
    if isinstance(param, MixedParam):
        return [(f"dataset_param.sources[{number}]", source) for number, source in enumerate(param.sources)]
    return [("dataset_param", param)]


def stopping(rows: Rows, param: SourceParam) -> list[str]:
    """Return the skip settings to turn on for a run to pass its unusable rows; empty if none are missing."""
    return [
        source.skip_key.replace("dataset_param", where)
        for (where, source), part in zip(sections(param), parts_of(rows))
        if part.skipped and not source.skip_bad
    ]


def joined(param: MixedParam, items: tuple[str, ...], parts: Sequence[Rows]) -> Rows:
    """Concatenate the rows of all sources.

    Raises:
        ConfigError: their classes differ.
    """
    for part, source in zip(parts, param.sources):
        if "label" in items and part.classes != parts[0].classes:
            raise ConfigError(
                f"dataset_param.sources: {source.where}",
                f"has the classes {', '.join(part.classes[:10])}, and the "
                f"first source {', '.join(parts[0].classes[:10])}",
                "name the classes of all sources alike",
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
    """Reads rows of several sources (``Visuals``), each with its source's reader; views have a column per source."""

    views = None

    def __init__(self, rows: Rows, readers: Sequence[Visuals], image_names: Iterable[str] = ()) -> None:
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

    def read(self, rows: np.ndarray, views: np.ndarray) -> Read:
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
        return Read({"pixels": np.stack(pixels), **arrays}, row_indices)


class MixedOrder(BucketOrder):
    """Endless order of groups, each from one source and bucket; each period gives every source ``weight`` groups.

    A period has as many groups as the weights add up to. Every source has its own order and epochs, and an epoch
    repeats no sample: a source with a large weight and few samples begins its next epoch sooner. members: the samples
    of each source; orders: the order of each.
    """

    def __init__(
        self,
        members: Sequence[np.ndarray],
        orders: Sequence[Order],
        group: int,
        weights: Sequence[int],
        seed: int,
        shuffle: bool,
        costs: np.ndarray,
    ) -> None:
        self.group, self._costs = group, costs
        self._members, self._orders, self._weights = members, orders, np.array(weights)

        def plan(period: int) -> np.ndarray:
            sources = np.repeat(np.arange(len(weights)), weights)
            return generator(seed, Stream.SOURCE, period).permutation(sources) if shuffle else sources

        self._plan: Callable[[int], np.ndarray] = lru_cache(maxsize=8)(plan)

    def __len__(self) -> int:
        return sum(map(len, self._orders))

    def images(self, sample_indices: np.ndarray) -> np.ndarray:
        """Return the row at each sample index, (B,) int64."""
        return np.array(
            [self._at(*divmod(sample_index, self.group)) for sample_index in sample_indices.tolist()], np.int64
        )

    def _at(self, group: int, offset: int) -> int:
        period, position = divmod(group, int(self._weights.sum()))
        plan = self._plan(period)
        source = plan[position]
        before = period * int(self._weights[source]) + int((plan[:position] == source).sum())
        rows = self._orders[source].images(np.array([before * self.group + offset]))
        return int(self._members[source][rows[0]])


def order_of(rows: Rows, param: SourceParam, seed: int, shuffle: bool, held_out: bool = False) -> Order:
    """Return the order of ``rows``; ``held_out``: for validation, which leaves no row out."""
    if rows.repeats is not None and not held_out:
        once = replace(rows.subset(rows.entries), repeats=None)
        return RepeatedOrder(order_of(once, param, seed, shuffle), rows.entries)
    if rows.shapes is None:
        return SampleOrder(len(rows), seed, shuffle)
    if isinstance(param, MixedParam) and not held_out:
        orders = [order_of(part, source, seed, shuffle) for part, source in zip(parts_of(rows), param.sources)]
        members, costs = rows.facts.members(), rows.shapes.prod(1)
        return MixedOrder(members, orders, param.bucket_group, param.weights, seed, shuffle, costs)
    return BucketOrder(_buckets(rows), param.bucket_group, seed, shuffle, held_out, rows.shapes.prod(1))


def _buckets(rows: Rows) -> np.ndarray:
    """Return the bucket of each row, counted from 0, (N,) int64."""
    assert rows.shapes is not None
    return np.unique(rows.shapes, axis=0, return_inverse=True)[1].reshape(-1)


def mixed_lines(rows: Rows, param: SourceParam) -> list[str]:
    """Return the lines a run prints about its buckets, per source if there are several."""
    parts = [part for part in parts_of(rows) if part.shapes is not None]
    bucket_lines = [lines(part.shapes[part.entries], param.bucket_group) for part in parts]  # type: ignore[index]
    if not isinstance(param, MixedParam):
        return [line for source_lines in bucket_lines for line in source_lines]
    return [
        f"source    {source.where}: {weight / sum(param.weights):.1%} of a run\n{source_lines[0]}"
        for source, weight, source_lines in zip(param.sources, param.weights, bucket_lines)
    ]
