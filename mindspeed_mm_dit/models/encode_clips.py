"""Fills a cache of clips: every clip through the autoencoder once, every caption through the text encoder.

Each rank encodes every so many-th shard; a shard appears under its name when it is whole, and one that is there is not
made again. The rank that finds all shards present writes the index.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from mindspeed_mm_dit.data.clip_samples import ClipReader
from mindspeed_mm_dit.data.features import (
    INDEX,
    NULL,
    FeatureIdentity,
    FeatureIndex,
    check_same,
    feature_path,
    kept_states,
)
from mindspeed_mm_dit.data.latents import first_not_finite, map_shard
from mindspeed_mm_dit.errors import DataError
from mindspeed_mm_dit.framework import ops
from mindspeed_mm_dit.models.encode_data import DTYPES, replace_file
from mindspeed_mm_dit.models.pixels import to_images
from mindspeed_mm_dit.models.text_encoder import TextEncoder


class ClipCacheWriter:
    """The shards of one cache, on one of ``world_size`` ranks; ``dtype``: fp32, or fp16 at half the size."""

    def __init__(
        self, folder: Path, reader: ClipReader, identity: FeatureIdentity, shard_clips: int = 256, dtype: str = "fp32"
    ) -> None:
        self.folder, self._reader, self._dtype = folder, reader, DTYPES[dtype]
        self.index = FeatureIndex(identity, len(reader.index), shard_clips)
        self._metadata = {"identity": json.dumps(asdict(identity)), "shard_clips": str(shard_clips), "dtype": dtype}
        folder.mkdir(parents=True, exist_ok=True)

    def missing(self, rank: int, world_size: int) -> list[int]:
        """Return the shards this rank still has to make.

        Raises:
            ConfigError: a shard that is there was made of other clips, or with other encoders.
            DataError: it is damaged, or has another layout.
        """
        shards = range(rank, self.index.num_shards, world_size)
        return [shard for shard in shards if not self._is_there(feature_path(self.folder, shard))]

    def _is_there(self, path: Path) -> bool:
        if not path.exists():
            return False
        _, metadata = map_shard(path)
        try:
            found = FeatureIdentity(**json.loads(metadata["identity"]))
        except (KeyError, ValueError, TypeError):
            raise DataError(str(path), "does not say what it was made of", "remove it") from None
        check_same(str(path), found, self.index.identity)
        for key in ("shard_clips", "dtype"):
            if metadata.get(key) != self._metadata[key]:
                raise DataError(
                    str(path), f"was made with {key} {metadata.get(key)}, and {self._metadata[key]} is asked for",
                    "use the same settings, or another --output",
                )  # fmt: skip
        return True

    def write(self, shard: int, autoencoder: Any, text_encoder: TextEncoder, on_clips: Callable[[int], None]) -> None:
        """Encode the clips of ``shard``, one at a time, and write them; ``on_clips`` is called after each.

        Raises:
            DataError: a clip or a caption has features that are not finite, or the disk does not take the shard.
        """
        parts: dict[str, list[np.ndarray]] = {}
        for clip in self.index.clips_of(shard):
            found = {**self._latents(clip, autoencoder), **self._texts(clip, text_encoder)}
            bad = [name for name, array in found.items() if first_not_finite(array) is not None]
            if bad:
                entry = self._reader.index.clips[clip].entry
                raise DataError(
                    f"line {entry.line} of {self._reader.param.json_path}: {entry.path}",
                    f"its {bad[0]} is not finite", "use --dtype fp32 and dtype fp32 of ae and text_encoder",
                )  # fmt: skip
            for name, array in found.items():
                parts.setdefault(name, []).append(array)
            on_clips(1)
        tensors = {name: np.concatenate(arrays) for name, arrays in parts.items()}
        replace_file(feature_path(self.folder, shard), lambda aside: save_file(tensors, aside, self._metadata))

    def _latents(self, clip: int, autoencoder: Any) -> dict[str, np.ndarray]:
        """Return mean and, if it is kept, std of a clip, each (1, C, f, h, w)."""
        pixels = self._reader.read(np.array([clip]), np.zeros(1))
        with ops.no_grad():
            moments = autoencoder.moments(to_images(ops.tensor(pixels)))
        names = ("mean", "std") if self.index.identity.with_std else ("mean",)
        return {name: self._rounded(ops.numpy(moment)) for name, moment in zip(names, moments)}

    def _texts(self, clip: int, text_encoder: TextEncoder) -> dict[str, np.ndarray]:
        captions = self._reader.index.clips[clip].entry.captions
        return {"captions": np.array([len(captions)]), **self._encoded(captions, text_encoder)}

    def _encoded(self, captions: tuple[str, ...], text_encoder: TextEncoder) -> dict[str, np.ndarray]:
        """Return the tokens of each caption, and the states that are kept of them, one caption after another."""
        states, mask = map(ops.numpy, text_encoder.encode(captions)[:2])
        tokens = mask.sum(1).astype(np.int64)
        kept = [own[:count] for own, count in zip(states, kept_states(tokens, self.index.identity).tolist())]
        return {"tokens": tokens, "states": self._rounded(np.concatenate(kept))}

    def _rounded(self, array: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):  # what fp16 cannot hold is found by ``write``
            return array.astype(self._dtype)

    def finish(self, text_encoder: Callable[[], TextEncoder]) -> bool:
        """Write the empty caption and the index if every shard is there; return whether it is.

        text_encoder: loads it, where the empty caption is not there yet.
        """
        if not all(feature_path(self.folder, shard).exists() for shard in range(self.index.num_shards)):
            return False
        if not self._is_there(self.folder / NULL):
            null = self._encoded(("",), text_encoder())
            replace_file(self.folder / NULL, lambda aside: save_file(null, aside, self._metadata))
        index = json.dumps(asdict(self.index), indent=1) + "\n"
        replace_file(self.folder / INDEX, lambda aside: aside.write_bytes(index.encode()))
        return True
