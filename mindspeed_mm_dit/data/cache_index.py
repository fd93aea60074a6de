"""The index.json of a cache, and the check that a run agrees with it. No framework."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mindspeed_mm_dit.configs.files import UnusableFile, read_bytes
from mindspeed_mm_dit.configs.limits import short_repr
from mindspeed_mm_dit.configs.strict import from_mapping
from mindspeed_mm_dit.data.cache_before import CLIPS_BEFORE, index_of_before
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
