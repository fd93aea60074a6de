"""The latents of a data set on disk, encoded once, with all that a run must agree on to use them. No framework.

    index.json               the identity of the cache, its images per shard; written last
    images.csv               image_path,label of every image, in the order of the rows
    latents-00000.safetensors  mean and std, each (images of the shard, 2, C, h, w); axis 1: as it is, mirrored

A posterior is kept, not a draw from it, so every epoch still draws its own latents.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from mindspeed_mm_dit.configs.data import DataConfig
from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.configs.strict import from_mapping
from mindspeed_mm_dit.data.files import UnusableFile, check_file, read_bytes
from mindspeed_mm_dit.data.reader import Read
from mindspeed_mm_dit.errors import ConfigError, DataError

INDEX, IMAGES = "index.json", "images.csv"
CROP = "upright by EXIF, 16 bits scaled to 8, halve by box, scale bicubically, cut the centre"
"""What ``transforms.load_pixels`` does; change this text with it, so that old caches are refused."""

MAKE_AGAIN = "remove it and run mm-dit cache-latents again: it keeps the other shards"

_DTYPES = {"F32": np.float32, "F16": np.float16, "I64": np.int64}


@dataclass(frozen=True)
class CacheIdentity:
    """What decides the numbers in a cache; a run must agree on each field."""

    autoencoder: str
    """SHA-256 of the autoencoder's files."""
    autoencoder_dtype: str
    """Precision it ran in."""
    image_size: int
    """Height and width of the images, in pixels."""
    crop: str = CROP
    """How images of other sizes are cut."""


@dataclass(frozen=True)
class CacheIndex:
    """All of index.json."""

    identity: CacheIdentity
    """What the cache was made by."""
    num_images: int
    """Rows over all shards."""
    shard_images: int
    """Rows in each shard but the last."""
    skipped: int = 0
    """Images of the folder that could not be read and have no row."""
    classes: tuple[str, ...] = ()
    """Name of each label; empty where they are not known."""
    pictures: str = ""
    """``ImageIndex.pictures`` of the images; empty where it is not known."""

    def __post_init__(self) -> None:
        for name in ("num_images", "shard_images"):
            if getattr(self, name) < 1:
                cure = "run mm-dit cache-latents again: it keeps what is encoded"
                raise ConfigError(f"{name} = {getattr(self, name)}", "must be positive", cure)

    @property
    def num_shards(self) -> int:
        """Number of shard files."""
        return -(-self.num_images // self.shard_images)

    def rows_of(self, shard: int) -> range:
        """Return the rows of a shard."""
        return range(shard * self.shard_images, min((shard + 1) * self.shard_images, self.num_images))


def identity_of(model: ModelConfig, data: DataConfig) -> CacheIdentity:
    """Return the identity that a cache for this model.json and data.json must have."""
    if not model.ae.is_cacheable:
        raise ConfigError(
            f"dataset_param.latents with ae.model_id = {model.ae.model_id!r}",
            "this autoencoder has no latents to keep: it trains on the images themselves",
            "drop dataset_param.latents",
        )
    return CacheIdentity(model.ae.digest(), model.ae.dtype, data.dataset_param.image_size, crop=CROP)


class LatentCache:
    """A complete cache, memory-mapped; safe to read from several threads and processes."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.index = read_cache_index(self.folder)
        self._shards = [self._open(shard) for shard in range(self.index.num_shards)]

    def _open(self, shard: int) -> dict[str, np.memmap]:
        path = shard_path(self.folder, shard)
        tensors, _ = map_shard(path)
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        images, latent = len(self.index.rows_of(shard)), next(iter(shapes.values()), ())[2:]
        if len(latent) != 3 or shapes != dict.fromkeys(("mean", "std"), (images, 2, *latent)):
            raise DataError(str(path), f"holds {shapes}, not mean and std (({images}, 2, C, h, w) each)", MAKE_AGAIN)
        return tensors

    @property
    def latent_shapes(self) -> set[tuple[int, ...]]:
        """(C, h, w) of the latents; of a good cache one."""
        return {shard["mean"].shape[2:] for shard in self._shards}

    def read(self, rows: np.ndarray, flipped: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return posterior mean and std of ``rows`` (B,), mirrored where ``flipped`` (B,); (B, C, h, w) float32."""
        shards, places = np.divmod(rows, self.index.shard_images)
        wanted = list(zip(shards.tolist(), places.tolist(), flipped.astype(int).tolist()))
        mean, std = (
            np.stack([self._shards[shard][name][place, side] for shard, place, side in wanted]).astype(np.float32)
            for name in ("mean", "std")
        )
        return mean, std


class LatentReader:
    """The latents of an index's images, as ``ImageReader`` gives their pixels.

    paths: names of the images; rows: where each stands in the cache.
    """

    def __init__(self, cache: LatentCache, paths: Sequence[str], rows: np.ndarray, with_std: bool) -> None:
        self._cache, self._paths, self._rows, self._with_std = cache, paths, rows, with_std

    def read(self, images: np.ndarray, flipped: np.ndarray) -> Read:
        """Return latent_mean and, for a sampled posterior, latent_std, each (B, C, h, w) float32, unscaled.

        Raises:
            DataError: one is not finite, so a step with it would spoil the weights.
        """
        mean, std = self._cache.read(self._rows[images], flipped)
        bad = first_not_finite(mean, std)
        if bad is not None:
            row = int(self._rows[images[bad]])
            raise DataError(
                str(shard_path(self._cache.folder, row // self._cache.index.shard_images)),
                f"the latents of {self._paths[images[bad]]} (row {row} of the cache) are not finite",
                MAKE_AGAIN,
            )
        return Read({"latent_mean": mean, "latent_std": std} if self._with_std else {"latent_mean": mean}, images)


def first_not_finite(*arrays: np.ndarray) -> int | None:
    """Return the first image, axis 0 of each of ``arrays``, with a number that is infinite or none; None: all good."""
    good = np.logical_and.reduce([np.isfinite(array).all(axis=tuple(range(1, array.ndim))) for array in arrays])
    return None if good.all() else int(np.argmin(good))


def check_identity(folder: str | Path, found: CacheIdentity, wanted: CacheIdentity) -> None:
    """Raise ConfigError naming the first thing in which a cache differs from what a run needs."""
    names = {
        "autoencoder": "another autoencoder",
        "autoencoder_dtype": "the autoencoder in another precision",
        "image_size": "images of another size",
        "crop": "another crop",
    }
    for field, words in names.items():
        there, here = asdict(found)[field], asdict(wanted)[field]
        if there != here:
            raise ConfigError(
                f"latents = {folder}",
                f"was made with {words}: {field} is {there!r} there and {here!r} here",
                "make a cache of its own for this model.json and data.json: mm-dit cache-latents",
            )


def check_latents(model: ModelConfig, data: DataConfig) -> None:
    """Raise ConfigError unless the cache that data.json names fits model.json and data.json; DataError if damaged."""
    folder = data.dataset_param.latents
    if folder is None:
        return
    check_identity(folder, read_cache_index(Path(folder)).identity, identity_of(model, data))
    shapes = LatentCache(folder).latent_shapes
    if shapes != {model.latent_shape}:
        raise ConfigError(
            f"dataset_param.latents = {folder}",
            f"holds latents of {sorted(shapes)}, and model.json makes {model.latent_shape} of an image",
            "correct ae.latent_channels, ae.downsample_factor or predictor.input_size",
        )


def read_cache_index(folder: Path) -> CacheIndex:
    """Read index.json; raises DataError if the cache is missing or not finished."""
    where = f"{folder}/{INDEX}"
    try:
        content = json.loads(read_bytes(folder / INDEX))
    except (UnusableFile, ValueError, RecursionError) as error:
        raise DataError(
            f"dataset_param.latents = {folder}",
            f"holds no finished cache of latents: {INDEX} {error}",
            f"run mm-dit cache-latents with --output {folder}; it goes on where it was interrupted",
        ) from None
    if isinstance(content, dict):
        content["identity"] = from_mapping(CacheIdentity, content.get("identity"), f"{where}: identity")
    return from_mapping(CacheIndex, content, where)


def read_cached_rows(folder: Path, num_images: int) -> list[tuple[str, int]]:
    """Return (image_path, label) of every row; raises DataError unless there are ``num_images``."""
    try:
        text = read_bytes(folder / IMAGES).decode("utf-8", "surrogateescape")
        rows = [(row["image_path"], int(row["label"])) for row in csv.DictReader(io.StringIO(text, newline=""))]
        if len(rows) != num_images:
            raise ValueError(f"it lists {len(rows)} images, where {INDEX} counts {num_images}")
    except (UnusableFile, ValueError, KeyError, TypeError, csv.Error) as error:
        raise DataError(
            f"dataset_param.latents = {folder}",
            f"{IMAGES} cannot be read: {error}",
            "run mm-dit cache-latents again: it keeps what is encoded",
        ) from None
    return rows


def shard_path(folder: Path, shard: int) -> Path:
    """Return where a shard stands."""
    return folder / f"latents-{shard:05d}.safetensors"


def map_shard(path: Path) -> tuple[dict[str, np.memmap], dict[str, str]]:
    """Map the tensors of a safetensors file into memory; return them and the file's metadata.

    Raises:
        DataError: it is damaged; one that is cut short is not mapped, since reading past its end would end the process.
    """
    try:
        check_file(path)
        with safe_open(path, "numpy") as checked:  # compares the header with the size of the file
            metadata = checked.metadata() or {}
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        tensors = {
            name: _map(path, entry["dtype"], 8 + length + entry["data_offsets"][0], entry["shape"])
            for name, entry in header.items()
        }
    except (UnusableFile, SafetensorError, OSError, ValueError, KeyError) as error:
        raise DataError(str(path), f"is no shard of latents: {error}", MAKE_AGAIN) from None
    return tensors, metadata


def _map(path: Path, dtype: str, offset: int, shape: list[int]) -> np.memmap:
    return np.memmap(path, _DTYPES[dtype], "r", offset, tuple(shape))
