"""A data set as another package brings it: images in one .npz, each with a label and the angle it was turned by."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.source import SourceParam
from mindspeed_mm_dit.data.sources import ReadSamples, Rows, Source, SourceRequest
from mindspeed_mm_dit.errors import DataError


@dataclass(frozen=True)
class TurnedParam(SourceParam):
    """Section ``dataset_param`` with ``dataset_type`` "turned"."""

    data_folder: str
    """Folder of turned.npz: images (N, H, W, C) uint8, labels (N,), angles (N,) in radians."""
    image_size: int
    """Height and width of the images, in pixels."""
    valid_fraction: float = 0.0
    """Part that is held out."""
    dataset_type: str = "turned"
    """Kind of data set."""

    items = ("label", "angle")

    @property
    def sample_size(self) -> tuple[int, int]:
        return self.image_size, self.image_size

    @property
    def where(self) -> str:
        return f"dataset_param.data_folder = {self.data_folder}"

    @property
    def size_setting(self) -> str:
        return f"dataset_param.image_size = {self.image_size}"

    def pixel_cache_key(self) -> str:
        return f"{self.image_size} x {self.image_size}, as they are"


def open_turned(param: TurnedParam, wanted: SourceRequest) -> Rows:
    """Return the rows of turned.npz; their images are kept in memory."""
    path = Path(param.data_folder, "turned.npz")
    try:
        with np.load(path, allow_pickle=False) as file:
            images, labels, angles = file["images"], file["labels"].astype(np.int64), file["angles"]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path} holds no turned images: {error}. Write it again.") from None
    if images.shape[1:3] != param.sample_size:
        raise DataError(f"{path} holds images of {images.shape[1]} x {images.shape[2]}. Correct image_size.")
    digest = hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()[:12]
    return Rows(
        tuple(f"{path}: image {n}" for n in range(len(images))),
        {"label": labels, "angle": angles.astype(np.float64)},
        tuple(map(str, range(1 + int(labels.max())))),
        digest=f"{len(images)} images, {digest}",
        facts=images,
    )


class InMemory:
    """Hands images out as they are."""

    views = 1

    def __init__(self, rows: Rows, param: TurnedParam, channels: int) -> None:
        self._images = rows.facts[..., :channels].transpose(0, 3, 1, 2)

    def views_at(self, seed: int, sample_indices: np.ndarray) -> np.ndarray:
        return np.zeros(len(sample_indices), np.int64)

    def read(self, rows: np.ndarray, views: np.ndarray) -> ReadSamples:
        return ReadSamples({"pixels": self._images[rows]}, rows)


def write_turned(folder: Path, count: int, side: int) -> dict[str, Any]:
    """Write ``count`` images of three classes to ``folder``; return the section of data.json that names them."""
    draw = np.random.default_rng(0)
    np.savez(folder / "turned.npz", images=draw.integers(0, 256, (count, side, side, 1), np.uint8),
             labels=np.arange(count) % 3, angles=draw.random(count) * 6)  # fmt: skip
    return {"dataset_type": "turned", "data_folder": str(folder), "image_size": side}


TURNED: Any = Source(TurnedParam, open_turned, InMemory)
