"""The rows of a data set: what each has besides its image or video, and how that becomes pixels.

A source (``data/sources.py``) lists and checks its rows; a cache has rows too. The rest of a run knows rows alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

PROBLEMS_SHOWN = 5

ANY_CLASSES = 1_000_000
"""Classes that a model could have."""


@dataclass(frozen=True, eq=False)
class Rows:
    """The samples of a data set that can be used, in a fixed order."""

    paths: Sequence[str]
    """Names of the images or videos: their files; of those in shards, shard and row in words."""
    items: Mapping[str, Any]
    """What each row has, by item: "label" (N,) int64; "caption" a tuple of strings each; "vector" (N, P) float32."""
    classes: tuple[str, ...] = ()
    """Name of each label; where labels are numbers, these."""
    skipped: int = 0
    """Rows left out because they could not be used."""
    problems: tuple[str, ...] = ()
    """The rows that were left out, each with the reason; none where a cache leaves them out."""
    notes: tuple[str, ...] = ()
    """What else a user should know of them: lines that begin with "note: " or "warning: "."""
    digest: str = ""
    """How many there are, and a digest of their names, sizes in bytes and items; empty where it is not known."""
    facts: Any = None
    """What its source knows of each row besides, a sequence as long as ``paths``; None where that is nothing."""
    shapes: np.ndarray | None = None
    """(N, 2): (H, W) in pixels that each image is brought to, or (N, 3): (F, H, W) of each video; None where all are
    brought to the size in data.json."""
    sizes: np.ndarray | None = None
    """The same of each file as it is, (N, 2 or 3); None without ``shapes``, or where it is not known."""
    cached: np.ndarray | None = None
    """(N,) int64: the row of the cache that data.json names; None without one."""

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def labels(self) -> np.ndarray:
        """(N,) int64."""
        return self.items["label"]

    @property
    def captions(self) -> Sequence[tuple[str, ...]]:
        """Captions of each row, of which one is drawn each time."""
        return self.items["caption"]

    def subset(self, rows: np.ndarray) -> Rows:
        """Return the rows numbered ``rows`` (n,)."""
        return dataclasses.replace(
            self,
            paths=_chosen(self.paths, rows),
            items={name: _chosen(column, rows) for name, column in self.items.items()},
            facts=_chosen(self.facts, rows),
            shapes=_chosen(self.shapes, rows),
            sizes=_chosen(self.sizes, rows),
            cached=_chosen(self.cached, rows),
        )


def _chosen(column: Any, rows: np.ndarray) -> Any:
    """Return the entries ``rows`` of an array, of a sequence with a way of its own (``subset``), or of another one."""
    if column is None or isinstance(column, np.ndarray):
        return None if column is None else column[rows]
    return column.subset(rows) if hasattr(column, "subset") else tuple(column[row] for row in rows.tolist())


class Read(NamedTuple):
    """What was read of some rows."""

    arrays: dict[str, np.ndarray]
    """By the names that a batch has for them."""
    rows: np.ndarray
    """(B,) int64: the rows that were read; another than asked for where that one cannot be."""


class Visuals(Protocol):
    """Reads the images or videos of some rows; called from several threads.

    A row can be looked at in several views: an image as it is and mirrored, a clip from another first frame.
    """

    @property
    def views(self) -> int | None:
        """How many views there are, of which a cache keeps each; None where they are without number."""

    def views_at(self, seed: int, sample_indices: np.ndarray) -> np.ndarray:
        """Return the view of each of ``sample_indices`` (B,), (B,): a function of the seed and these."""

    def read(self, rows: np.ndarray, views: np.ndarray) -> Read:
        """Return the arrays of ``rows`` (B,) int64 in ``views`` (B,)."""


@dataclass(frozen=True)
class Wanted:
    """What a source is asked for."""

    items: tuple[str, ...] = ()
    """Items that the rows must have."""
    num_classes: int | None = None
    """Labels must lie below; None: whatever labels there are."""
    caption_problems: Sequence[Any] = field(default_factory=tuple)
    """Of each text encoder: captions -> what is wrong with each, "" for a good one."""
    decode_all: bool = False
    """Decode every file, however many there are."""
