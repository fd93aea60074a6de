"""Latents and text states of clips on disk, encoded once, with all that a run must agree on to use them. No framework.

    index.json                    the identity of the cache, its clips per shard; written last
    null.safetensors              the empty caption: states (kept, D), tokens (1,)
    features-00000.safetensors    mean and, where the posterior is sampled, std: (clips of the shard, C, f, h, w);
                                  captions (clips,): how many each has; tokens (captions,): of each;
                                  states (kept of all captions, D)

Of a caption as many states are kept as it has tokens, if padding is set to zero, and ``max_length`` if it is not: a
caption of 20 words takes a twentieth of what it takes padded. Safetensors, as the latents of images: shards are
mapped into memory, a crash costs one of them, and ranks write theirs without meeting.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.autoencoder import AutoencoderConfig
from mindspeed_mm_dit.configs.clips import ClipsParam
from mindspeed_mm_dit.configs.limits import shown
from mindspeed_mm_dit.configs.strict import from_mapping
from mindspeed_mm_dit.configs.text_encoder import TextEncoderConfig
from mindspeed_mm_dit.data.clip_samples import NO_CAPTION, ClipDraws
from mindspeed_mm_dit.data.dataset import Batch
from mindspeed_mm_dit.data.files import UnusableFile, read_bytes
from mindspeed_mm_dit.data.latents import first_not_finite, map_shard
from mindspeed_mm_dit.errors import ConfigError, DataError

INDEX, NULL = "index.json", "null.safetensors"
MAKE_AGAIN = "remove it and run mm-dit cache-latents again: it keeps the other shards"
GO_ON = "run mm-dit cache-latents; it goes on where it was interrupted"


_PARTS = {
    "clips": ("the number of clips is", "the digest of their paths, sizes in bytes and captions is"),
    "autoencoder": ("the digest of the autoencoder's files is", "its dtype and tiles are"),
    "text_encoder": (
        "the digest of the text encoder's files is", "that of the tokenizer's files is", "the encoder's dtype is",
    ),
}  # fmt: skip
"""Of fields that say several things: what each part of the text is."""
_SHA256 = re.compile(r"(?:tokenizer )?\b([0-9a-f]{64})\b")


@dataclass(frozen=True)
class FeatureIdentity:
    """What decides the numbers in a cache; a run must agree on each field."""

    clips: str
    """``ClipIndex.digest``: paths, sizes and captions of the clips."""
    frames: str
    """Number, size, rate and cut of the frames."""
    autoencoder: str
    """SHA-256 of the autoencoder's files, its precision and tiles."""
    text_encoder: str
    """SHA-256 of the files of encoder and tokenizer, precision and length."""
    zero_padding: bool
    """Whether the states of the padding are zero, and so not kept."""
    max_length: int
    """Tokens L of a caption with its padding."""
    with_std: bool
    """Whether the posterior's standard deviation is kept."""


@dataclass(frozen=True)
class FeatureIndex:
    """All of index.json."""

    identity: FeatureIdentity
    """What the cache was made of and by."""
    num_clips: int
    """Rows over all shards."""
    shard_clips: int
    """Rows in each shard but the last."""

    def __post_init__(self) -> None:
        for name in ("num_clips", "shard_clips"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)}", "must be positive", GO_ON)

    @property
    def num_shards(self) -> int:
        """Number of shard files."""
        return -(-self.num_clips // self.shard_clips)

    def clips_of(self, shard: int) -> range:
        """Return the clips of a shard."""
        return range(shard * self.shard_clips, min((shard + 1) * self.shard_clips, self.num_clips))


def feature_identity(clips: str, param: ClipsParam, ae: AutoencoderConfig, text: TextEncoderConfig) -> FeatureIdentity:
    """Return the identity that a cache must have; ``clips``: digest of the index; ``ae``: section "ae".

    Raises ConfigError for clips that are other frames each time.
    """
    if param.clip_start != "first":
        raise ConfigError(
            f"dataset_param.clip_start = {param.clip_start!r}", "clips that begin elsewhere each time cannot be kept",
            'set it to "first", or train without a cache',
        )  # fmt: skip
    rate = "all" if param.train_fps is None else f"{param.train_fps:g}"
    return FeatureIdentity(
        clips,
        f"{param.num_frames} of {param.max_height} x {param.max_width}, fps {rate}, crop {param.crop}",
        ae.identity(),
        text.identity(),
        text.zero_padding,
        text.max_length,
        ae.samples_posterior,
    )


def check_same(where: str, found: FeatureIdentity, wanted: FeatureIdentity) -> None:
    """Raise ConfigError naming the first thing in which a cache differs from what is wanted."""
    for field, here in asdict(wanted).items():
        there = asdict(found)[field]
        if there != here:
            raise ConfigError(
                where, f"was made with other settings: {_difference(field, there, here)}",
                "make a cache of its own, in another folder: mm-dit cache-latents",
            )  # fmt: skip


def _difference(field: str, there: Any, here: Any) -> str:
    """Return what differs; of a field that says several things, those of them that do."""
    names = _PARTS.get(field, ())
    parts = [str(value).split(", ", max(0, len(names) - 1)) for value in (there, here)]
    if {len(part) for part in parts} != {len(names)} or "pixel" in (parts[0][0], parts[1][0]):
        return f"{field} is {_short(there)} there and {_short(here)} here"
    pairs = zip(names, *parts)
    return "; ".join(f"{name} {_short(a)} there and {_short(b)} here" for name, a, b in pairs if a != b)


def _short(value: Any) -> str:
    """Return a value as it is shown: of a SHA-256 the first digits, without the word before it."""
    return shown(_SHA256.sub(lambda found: found[1][:12], value) if isinstance(value, str) else value)


def feature_path(folder: Path, shard: int) -> Path:
    """Return where a shard stands."""
    return folder / f"features-{shard:05d}.safetensors"


def read_feature_index(folder: Path) -> FeatureIndex:
    """Read index.json; raises DataError if the cache is missing or not finished."""
    try:
        content = json.loads(read_bytes(folder / INDEX))
    except (UnusableFile, ValueError, RecursionError) as error:
        raise DataError(str(folder), f"holds no finished cache of clips: {INDEX} {error}", GO_ON) from None
    where = f"{folder}/{INDEX}"
    if isinstance(content, dict):
        content["identity"] = from_mapping(FeatureIdentity, content.get("identity"), f"{where}: identity")
    return from_mapping(FeatureIndex, content, where)


class _Captions:
    """The states of some captions, one after another, each of its own length."""

    def __init__(self, path: Path, tensors: dict[str, np.memmap], identity: FeatureIdentity) -> None:
        self._states, self._tokens, self._length = tensors["states"], np.asarray(tensors["tokens"]), identity.max_length
        kept = kept_states(self._tokens, identity)
        self._ends = np.cumsum(kept)
        self._starts = self._ends - kept
        if self._states.ndim != 2 or len(self._states) != kept.sum():
            raise DataError(str(path), f"holds {self._states.shape} states of {kept.sum()} tokens", MAKE_AGAIN)

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def width(self) -> int:
        """Width D of a state."""
        return int(self._states.shape[1])

    def read(self, caption: int) -> tuple[np.ndarray, np.ndarray]:
        """Return states (L, D) float32 and mask (L,) int64 of one of them."""
        states = np.zeros((self._length, self._states.shape[1]), np.float32)
        own = self._states[self._starts[caption] : self._ends[caption]]
        states[: len(own)] = own
        return states, (np.arange(self._length) < self._tokens[caption]).astype(np.int64)


def kept_states(tokens: np.ndarray, identity: FeatureIdentity) -> np.ndarray:
    """Return how many states are kept of captions with so many ``tokens``."""
    return tokens if identity.zero_padding else np.full_like(tokens, identity.max_length)


class _Shard:
    """Some clips: their latents, and the states of their captions."""

    def __init__(self, path: Path, clips: int, identity: FeatureIdentity) -> None:
        latents = ("mean", "std") if identity.with_std else ("mean",)
        tensors = _tensors(path, *latents, "captions", "tokens", "states")
        self.path, self.latents = path, {name: tensors[name] for name in latents}
        self._captions = _Captions(path, tensors, identity)
        self.width = self._captions.width
        counts = np.asarray(tensors["captions"])
        self._first = np.cumsum(counts) - counts
        rows = {len(array) for array in (counts, *self.latents.values())}
        if rows != {clips} or counts.sum() != len(self._captions):
            raise DataError(str(path), f"holds other clips or captions than the {clips} of the index", MAKE_AGAIN)

    @property
    def offered(self) -> np.ndarray:
        """Captions of each clip, (clips,) int64."""
        return np.diff(self._first, append=len(self._captions))

    def caption(self, row: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return states (L, D) float32 and mask (L,) int64 of caption ``number`` of the clip in ``row``."""
        return self._captions.read(int(self._first[row]) + number)


def _tensors(path: Path, *names: str) -> dict[str, np.memmap]:
    tensors, _ = map_shard(path)
    if missing := [name for name in names if name not in tensors]:
        raise DataError(str(path), f"holds no {missing[0]}", MAKE_AGAIN)
    return tensors


class FeatureCache:
    """A complete cache, memory-mapped; safe to read from several threads and processes.

    Raises DataError where it is damaged.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.index = read_feature_index(self.folder)
        identity = self.index.identity
        null = self.folder / NULL
        self._null = _Captions(null, _tensors(null, "states", "tokens"), identity)
        self._shards = [
            _Shard(feature_path(self.folder, shard), len(self.index.clips_of(shard)), identity)
            for shard in range(self.index.num_shards)
        ]

    def check(self, wanted: FeatureIdentity) -> None:
        """Raise ConfigError where the cache is not what ``wanted`` says."""
        check_same(f"dataset_param.features = {self.folder}", self.index.identity, wanted)

    @property
    def offered(self) -> np.ndarray:
        """Captions of each clip, (N,) int64."""
        return np.concatenate([shard.offered for shard in self._shards])

    @property
    def shapes(self) -> set[tuple[tuple[int, ...], int]]:
        """(C, f, h, w) of the latents and width D of the states; of a good cache one pair."""
        return {(shard.latents["mean"].shape[1:], shard.width) for shard in self._shards}

    def read(self, clips: np.ndarray, captions: np.ndarray) -> Batch:
        """Return what is kept of ``clips`` (B,), each with its caption of the number in ``captions`` (B,), or -1: none.

        latent_mean and, where it is kept, latent_std (B, C, f, h, w) float32, raw; text (B, L, D) float32, the states;
        text_mask (B, L) int64, 0 for padding.
        Raises:
            DataError: one is not finite, so a step with it would spoil the weights.
        """
        places = [divmod(clip, self.index.shard_clips) for clip in clips.tolist()]
        rows = [(self._shards[shard], row) for shard, row in places]
        texts = [
            self._null.read(0) if number == NO_CAPTION else shard.caption(row, number)
            for (shard, row), number in zip(rows, captions.tolist())
        ]
        batch = {
            f"latent_{name}": np.stack([shard.latents[name][row] for shard, row in rows]).astype(np.float32)
            for name in self._shards[0].latents
        }
        batch["text"] = np.stack([states for states, _ in texts])
        bad = first_not_finite(*batch.values())
        if bad is not None:
            raise DataError(str(rows[bad][0].path), f"the features of clip {clips[bad]} are not finite", MAKE_AGAIN)
        batch["text_mask"] = np.stack([mask for _, mask in texts])
        return batch


class FeatureSamples:
    """The samples of a run from a cache; safe to call from several threads."""

    def __init__(self, cache: FeatureCache, drawn: ClipDraws) -> None:
        self._cache, self._drawn = cache, drawn

    def batch(self, positions: np.ndarray) -> Batch:
        """Return the samples at ``positions`` (B,) int64: what ``FeatureCache.read`` gives, and the other draws."""
        clips = self._drawn.clips_at(positions)
        return {**self._cache.read(clips, self._drawn.captions(positions)), **self._drawn.others(positions)}
