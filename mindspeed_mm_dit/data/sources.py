"""The interface of data sources: how one is opened, the rows (samples) that it lists, and the reader of their pixels.

A source lists and checks its rows; a cache has rows too. The rest of a run knows only rows and readers.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from mindspeed_mm_dit.registry import Registry
from mindspeed_mm_dit.terminal import progress

PROBLEMS_SHOWN = 5
MAX_KINDS = 10
FILES_PER_TASK = 32
"""Handing one file to a thread costs as much as looking at a small one."""
CACHE_AGAIN = "Make the cache again, in an empty folder: mm-dit cache-latents --model ... --data ... --output ..."
"""What to do about a cache that does not fit the data set."""

In = TypeVar("In")
Out = TypeVar("Out")


@dataclass(frozen=True, eq=False)
class Rows:
    """The usable samples of a data set, in a fixed order."""

    paths: Sequence[str]
    """Names of the images or videos: their files or, in shards, shard and row in words."""
    items: Mapping[str, Any]
    """Values of the rows, by item: "label" (N,) int64; "caption" a tuple of strings each; "vector" (N, P) float32."""
    classes: tuple[str, ...] = ()
    """Name of each label; the numbers themselves if labels have no names."""
    skipped: int = 0
    """Rows left out because they could not be used."""
    problems: tuple[str, ...] = ()
    """The rows that were left out, each with the reason; empty if a cache left them out."""
    notes: tuple[str, ...] = ()
    """Further lines for the user that begin with "note: " or "warning: "."""
    digest: str = ""
    """Number of rows, and a digest of their names, sizes in bytes and items; empty if unknown."""
    facts: Any = None
    """What else the source knows of each row, a sequence as long as ``paths``; None if nothing."""
    shapes: np.ndarray | None = None
    """Target shape of each row: (N, 2), (H, W) of images, or (N, 3), (F, H, W) of videos, in pixels; None if all have
    the size in data.json."""
    sizes: np.ndarray | None = None
    """The same for each file before scaling, (N, 2 or 3); None if unknown or without ``shapes``."""
    repeats: np.ndarray | None = None
    """(N,) int64: how often an epoch takes each row to train on; None if once."""
    cached: np.ndarray | None = None
    """(N,) int64: row number in the cache that data.json names; None without a cache."""
    files: Sequence[str] = ()
    """Files that the rows are read from, if they are not ``paths``."""

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def labels(self) -> np.ndarray:
        """Label of each row, (N,) int64."""
        return self.items["label"]

    @property
    def captions(self) -> Sequence[tuple[str, ...]]:
        """Captions of each row; one is chosen at random each time."""
        return self.items["caption"]

    @property
    def entries(self) -> np.ndarray:
        """Row of each sample of an epoch to train on, ascending, (E,) int64."""
        return np.repeat(np.arange(len(self)), 1 if self.repeats is None else self.repeats)

    def subset(self, rows: np.ndarray) -> Rows:
        """Return the rows numbered ``rows`` (n,)."""
        columns = ("paths", "facts", "shapes", "sizes", "repeats", "cached")
        chosen = {name: _chosen(getattr(self, name), rows) for name in columns}
        items = {name: _chosen(column, rows) for name, column in self.items.items()}
        return dataclasses.replace(self, items=items, **chosen)


def _chosen(column: Any, rows: np.ndarray) -> Any:
    """Return the entries ``rows`` of an array, of a sequence with a method ``subset``, or of any other sequence."""
    if column is None or isinstance(column, np.ndarray):
        return None if column is None else column[rows]
    return column.subset(rows) if hasattr(column, "subset") else tuple(column[row] for row in rows.tolist())


class ReadSamples(NamedTuple):
    """The arrays that were read for some rows."""

    arrays: dict[str, np.ndarray]
    """Arrays by their names in a batch."""
    rows: np.ndarray
    """(B,) int64: the rows that were read; they include replacements of rows that cannot be read."""


class VisualReader(Protocol):
    """Reads the images or videos of some rows; called from several threads.

    A row can be read in several views: an image plain or mirrored, a clip from different first frames.
    """

    @property
    def views(self) -> int | None:
        """Number of views, all of which a cache keeps; None if they cannot be counted."""

    def views_at(self, seed: int, sample_indices: np.ndarray) -> np.ndarray:
        """Return the view for each of ``sample_indices`` (B,), as (B,); it depends only on these and the seed."""

    def read(self, rows: np.ndarray, views: np.ndarray) -> ReadSamples:
        """Read ``rows`` (B,) int64 in ``views`` (B,)."""


@dataclass(frozen=True)
class SourceRequest:
    """A request to a source."""

    items: tuple[str, ...] = ()
    """Items that the rows must have."""
    num_classes: int | None = None
    """Labels must lie below this; None allows any labels."""
    caption_problems: Sequence[Callable[[Sequence[str]], list[str]]] = ()
    """For each text encoder: captions -> what is wrong with each, "" for a good one."""
    decode_all: bool = False
    """Decode every file, however many there are."""
    classes: Sequence[str] = ()
    """Class names of a run to continue: the same set of names keeps its numbers."""
    frame_rate: float | None = None
    """Frames per second of the model's videos; None if it has no rate."""


@dataclass(frozen=True)
class Source:
    """A kind of data set."""

    config: type
    """Class of section ``dataset_param`` (``SourceParam``)."""
    open: Callable[[Any, SourceRequest], Rows]
    """(section, request) -> the rows, every one checked; raises DataError."""
    visuals: Callable[[Rows, Any, int], VisualReader]
    """(rows, section, channels of an image or a frame) -> the reader of their pixels."""
    provide: Callable[[Any], None] = lambda param: None
    """Writes the built-in data that the section names, with files that model.json may name, unless they exist."""
    as_listed: Callable[[Any, Rows], Rows] = lambda param, rows: rows
    """(section, rows of a cache) -> the rows, compared with the files if these exist; raises DataError."""


SOURCES = Registry[Source]("data_source")
"""The kinds of data set, by ``dataset_param.dataset_type``."""


def register_source(dataset_type: str, source: Source) -> None:
    """Add a kind of data set; raises ConfigError if another one has its name."""
    SOURCES[dataset_type] = source


def source_of(param: Any) -> Source:
    """Return the kind of a section ``dataset_param``."""
    return SOURCES[param.dataset_type]


def left_out_note(counts: Counter[str]) -> list[str]:
    """Return a note with how many of each kind are left out, the most first; empty if nothing is."""
    by_count = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    kinds = [f"{count:,} {kind}" for kind, count in by_count]
    if len(kinds) > MAX_KINDS:
        kinds[MAX_KINDS:] = ["..."]
    return [f"note: left out: {', '.join(kinds)}"] if kinds else []


def first_names(names: Sequence[str], most: int = PROBLEMS_SHOWN) -> str:
    """Return the first of ``names`` with commas, and an ellipsis if there are more."""
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def map_in_threads(
    work: Callable[[In], Out], items: Sequence[In], what: str = "", unit: str = "file", per_task: int = FILES_PER_TASK
) -> Iterator[Out]:
    """Yield ``work(item)`` for each item, in order; with a progress bar called ``what`` if that takes long."""
    parts = [items[start : start + per_task] for start in range(0, len(items), per_task)]
    with ThreadPoolExecutor() as pool:
        results = (result for part in pool.map(lambda part: [work(item) for item in part], parts) for result in part)
        yield from progress(what, results, total=len(items), unit=unit, delay=2) if what else results
