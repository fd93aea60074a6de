"""Fills a latent cache: every image of a data set through the autoencoder once, as it is and mirrored.

Each rank encodes every so many-th shard; a shard appears under its name when it is whole, and one that is
there is not made again. The rank that finds all shards present writes the index.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from mindspeed_mm_dit.data.folder import ImageIndex
from mindspeed_mm_dit.data.images import ImageReader
from mindspeed_mm_dit.data.latents import (
    IMAGES,
    INDEX,
    CacheIdentity,
    CacheIndex,
    check_identity,
    first_not_finite,
    map_shard,
    shard_path,
)
from mindspeed_mm_dit.data.loader import load_batches
from mindspeed_mm_dit.errors import DataError
from mindspeed_mm_dit.framework import ops
from mindspeed_mm_dit.models.autoencoder import Autoencoder
from mindspeed_mm_dit.models.pixels import to_images

DTYPES = {"fp32": np.float32, "fp16": np.float16}


@dataclass(frozen=True)
class EncodeSettings:
    """How a cache is filled."""

    batch_size: int = 16
    """Images encoded together."""
    shard_images: int = 4096
    """Images in a file."""
    dtype: str = "fp32"
    """Precision on disk: fp32, or fp16 at half the size."""
    num_workers: int = 2
    """Threads that decode images ahead."""


class PixelBatches:
    """Batches of pixels by row, in the form ``load_batches`` asks for."""

    def __init__(self, reader: ImageReader) -> None:
        self._reader = reader

    def batch(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        """Return pixels (B, 3, H, W) uint8 of the rows ``positions``."""
        return self._reader.read(positions, np.zeros(len(positions), bool)).arrays


class CacheWriter:
    """The shards of one cache, on one of ``world_size`` ranks."""

    def __init__(
        self, folder: Path, index: ImageIndex, names: list[str], identity: CacheIdentity, settings: EncodeSettings
    ) -> None:
        self.folder, self.settings, self._images = folder, settings, index
        self.index = CacheIndex(
            identity, len(index), settings.shard_images, index.skipped, index.classes, index.pictures
        )
        self._csv = _csv_of(names, index.labels.tolist())
        self._metadata = {
            **{key: str(value) for key, value in asdict(identity).items()},
            "images": hashlib.sha256(_bytes_of(self._csv)).hexdigest(),
            "shard_images": str(settings.shard_images),
            "dtype": settings.dtype,
        }
        folder.mkdir(parents=True, exist_ok=True)

    def missing(self, rank: int, world_size: int) -> list[int]:
        """Return the shards this rank still has to make.

        Raises:
            ConfigError: a shard that is there was made with another autoencoder or crop.
            DataError: it was made from other images or in another layout.
        """
        return [shard for shard in range(rank, self.index.num_shards, world_size) if not self._is_there(shard)]

    def _is_there(self, shard: int) -> bool:
        path = shard_path(self.folder, shard)
        if not path.exists():
            return False
        _, metadata = map_shard(path)
        check_identity(self.folder, _identity_in(metadata), self.index.identity)
        for key, value in self._metadata.items():
            if metadata.get(key) != value:
                raise DataError(
                    str(path),
                    f"was made with other settings: {key} is {metadata.get(key)!r} there and {value!r} here",
                    "use the same settings, or another --output",
                )
        return True

    def write(self, shard: int, autoencoder: Autoencoder, on_images: Callable[[int], None]) -> None:
        """Encode the images of ``shard`` and write them; ``on_images`` is called with the images of each batch.

        Raises:
            DataError: an image has latents that are not finite, or the disk does not take the shard.
        """
        kept: dict[str, list[np.ndarray]] = {"mean": [], "std": []}
        done = self.index.rows_of(shard).start
        for pixels in self._pixels(shard):
            moments = encode_moments(autoencoder, np.concatenate([pixels, pixels[:, :, :, ::-1]]))
            with np.errstate(over="ignore"):  # what fp16 cannot hold is found below
                parts = [np.stack(np.split(sides, 2), 1).astype(DTYPES[self.settings.dtype]) for sides in moments]
            self._check_finite(parts, done)
            for name, part in zip(kept, parts):
                kept[name].append(part)
            done += len(pixels)
            on_images(len(pixels))
        tensors = {name: np.concatenate(parts) for name, parts in kept.items()}
        replace_file(shard_path(self.folder, shard), lambda aside: save_file(tensors, aside, self._metadata))

    def _check_finite(self, parts: list[np.ndarray], first_row: int) -> None:
        bad = first_not_finite(*parts)
        if bad is not None:
            raise DataError(
                self._images.paths[first_row + bad],
                f"its latents are not finite ({self.settings.dtype}, autoencoder in "
                f"{self.index.identity.autoencoder_dtype})",
                "use --dtype fp32 and ae.dtype fp32; with those the autoencoder's weights are damaged",
            )

    def _pixels(self, shard: int) -> Iterator[np.ndarray]:
        size, channels = self.index.identity.image_size, 3
        rows = np.array(self.index.rows_of(shard), np.int64)
        batches = np.array_split(rows, range(self.settings.batch_size, len(rows), self.settings.batch_size))
        reader = PixelBatches(ImageReader(self._images, size, channels))
        return (batch["pixels"] for batch in load_batches(reader, batches, self.settings.num_workers, 4))

    def finish(self) -> bool:
        """Write the index if every shard is there; return whether it is."""
        if not all(shard_path(self.folder, shard).exists() for shard in range(self.index.num_shards)):
            return False
        index = json.dumps(asdict(self.index), indent=1) + "\n"
        replace_file(self.folder / IMAGES, lambda aside: aside.write_bytes(_bytes_of(self._csv)))
        replace_file(self.folder / INDEX, lambda aside: aside.write_bytes(_bytes_of(index)))
        return True


def _identity_in(metadata: dict[str, str]) -> CacheIdentity:
    return CacheIdentity(
        metadata.get("autoencoder", ""),
        metadata.get("autoencoder_dtype", ""),
        int(size) if (size := metadata.get("image_size", "")).isdecimal() else 0,
        metadata.get("crop", ""),
    )


def encode_moments(autoencoder: Autoencoder, pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and std (B, C, h, w) float32 of the latents of pixels (B, 3, H, W) uint8."""
    with ops.no_grad():
        images = to_images(ops.tensor(np.ascontiguousarray(pixels)))
        mean, std = autoencoder.moments(images)
        mean = ops.numpy(mean)
        return mean, np.zeros_like(mean) if std is None else ops.numpy(std)


def _csv_of(names: list[str], labels: list[int]) -> str:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["image_path", "label"])
    writer.writerows(zip(names, labels))
    return text.getvalue()


def _bytes_of(text: str) -> bytes:
    """Return ``text`` as UTF-8; names of files that are none keep their bytes."""
    return text.encode("utf-8", "surrogateescape")


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Have ``write`` fill a file beside ``path`` and move it there; raises DataError where that fails."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(aside)
        os.replace(aside, path)
    except (OSError, SafetensorError) as error:
        aside.unlink(missing_ok=True)
        cure = "make room and run again: finished shards are kept"
        raise DataError(str(path), f"cannot be written: {error}", cure) from None
