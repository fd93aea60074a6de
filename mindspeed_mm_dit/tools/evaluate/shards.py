"""Generate many images on several ranks, into files of one folder; files that exist are not generated again.

    drawing.json         the settings that determine the images: a folder is continued only if they are the same
    images/000000.npy    images 0 ... 249, (250, H, W, C) uint8; a file gets its name when it is complete
    samples.npz          all images and their labels, once all exist; the files are then removed

Image n depends only on the drawing and n, so it does not matter which rank generates it, or when.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mindspeed_mm_dit.checkpoint.store import without_places
from mindspeed_mm_dit.configs.files import replace_file
from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.data.order import Stream, generator
from mindspeed_mm_dit.errors import ConfigError, DataError
from mindspeed_mm_dit.sampling.conditions import SampleConditions
from mindspeed_mm_dit.sampling.generate import generate
from mindspeed_mm_dit.sampling.request import SampleRequest

SHARD_IMAGES = 250
"""Images per file, and so the most that a rank loses when it is killed."""
DRAWING, ENTRIES, JOINED = "drawing.json", "images", "samples.npz"
_MAY_BE_EMPTY = ("cfg_rescale", "prompts_sha256", "adapters", "weaker_sha256")
"""Keys of drawing.json that are left out if they are empty."""
LabelRule = Literal["equal", "random"]


@dataclass(frozen=True)
class Drawing:
    """The settings that determine the images of an evaluation: equal drawings give equal images, up to rounding."""

    num: int
    """Number of images."""
    labels: LabelRule
    """Image n has label n modulo the classes ("equal"), or one drawn uniformly for n ("random", as DiT's samples)."""
    seed: int
    """Seed of the noise and of the random labels."""
    sampler: str
    steps: int
    options: dict[str, Any]
    """Further options of the sampler."""
    cfg_scale: float
    cfg_channels: str
    cfg_interval: list[float]
    """Noise levels with guidance, from and to."""
    weights: str
    """Which weights: "ema" or "model"."""
    checkpoint_sha256: str
    """Digest of the file, or of the facts and checksums in a checkpoint folder."""
    autoencoder_sha256: str
    """Digest of its files; empty if the model generates pixels."""
    model: dict[str, Any]
    """model.json with defaults filled in."""
    bf16: bool
    ai_framework: str
    adapters: list[str] = field(default_factory=list)
    """Digest and strength of each (LoRA) that was added to the weights; not written if there are none."""
    images_per_file: int = SHARD_IMAGES
    weaker_sha256: str = ""
    """Digest of the weaker model for guidance; empty and not written if guidance uses the unconditional model."""
    cfg_rescale: str = ""
    """Rescaling of guided predictions; empty and not written if there is none."""
    prompts_sha256: str = ""
    """Digest of the prompts file; empty and not written for a class-conditional model."""

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values: tuples become lists."""
        content = without_places(json.loads(json.dumps(asdict(self))))
        return {name: value for name, value in content.items() if value or name not in _MAY_BE_EMPTY}


def draw_labels(rule: LabelRule, num: int, num_classes: int, seed: int) -> np.ndarray:
    """Return the label of each of ``num`` images, (num,) int64; the label of an image does not depend on ``num``."""
    if rule == "equal":
        return np.arange(num, dtype=np.int64) % num_classes
    return np.array([generator(seed, Stream.SAMPLE_LABEL, n).integers(num_classes) for n in range(num)], np.int64)


class Shards:
    """The folder of one drawing."""

    def __init__(self, folder: Path, drawing: Drawing) -> None:
        """Open ``folder``, which may be new, empty, or of the same drawing.

        Raises:
            ConfigError: it holds the images of another drawing; the settings that differ are named.
        """
        self.folder, self.drawing, self.joined = folder, drawing, folder / JOINED
        stored, current, what = without_places(read_drawing(folder)), drawing.as_json(), f"--output = {folder}"
        if stored is None:
            if self.joined.exists() or any(folder.glob(f"{ENTRIES}/*.npy")):
                raise ConfigError(what, f"holds images, but no {DRAWING} that describes them", "name another folder")
        elif stored != current:
            differ = [name for name in sorted({*stored, *current}) if stored.get(name) != current.get(name)]
            words = [f"{name} was {stored.get(name)!r}, is {current.get(name)!r}" for name in differ if name != "model"]
            raise ConfigError(
                what, f"holds images of another evaluation: {'; '.join(words) or 'model.json or --size is another'}",
                "name another folder, or repeat its settings to continue it",
            )  # fmt: skip

    def begin(self) -> None:
        """Create the folder and write drawing.json; call this on one rank only."""
        (self.folder / ENTRIES).mkdir(parents=True, exist_ok=True)
        for left in [*self.folder.glob(f".{JOINED}.*"), *self.folder.glob(f"{ENTRIES}/.*.npy.*")]:  # by a killed run
            left.unlink()
        content = json.dumps(self.drawing.as_json(), indent=1) + "\n"
        replace_file(self.folder / DRAWING, lambda aside: aside.write_text(content, encoding="utf-8"))

    def missing(self) -> list[int]:
        """Return the numbers of the files that are still missing."""
        return [] if self.joined.exists() else [shard for shard in self._all() if not self._path(shard).exists()]

    def _all(self) -> range:
        return range(-(-self.drawing.num // self.drawing.images_per_file))

    def numbers(self, shard: int) -> np.ndarray:
        """Return the numbers of the images in a file."""
        start = shard * self.drawing.images_per_file
        return np.arange(start, min(start + self.drawing.images_per_file, self.drawing.num))

    def write(self, shard: int, images: np.ndarray) -> None:
        """Write the images (N, H, W, C) uint8 of a file; raises DataError if that fails."""
        assert len(images) == len(self.numbers(shard))

        def save(aside: Path) -> None:
            with open(aside, "wb") as file:
                np.save(file, images)

        replace_file(self._path(shard), save)

    def join(self, labels: np.ndarray) -> None:
        """Write all images and ``labels`` (num,) as ADM's npz, a file at a time, and remove the files; one rank only.

        Equal images give equal bytes: no time is stored. Raises DataError if a file is missing or incomplete.
        """
        if missing := self.missing():
            raise DataError(
                f"{self.folder}/{ENTRIES}", f"lacks {len(missing)} of its files, {self._path(missing[0]).name} first",
                "every rank must see the same --output: use a disk that all machines share",
            )  # fmt: skip
        if not self.joined.exists():
            replace_file(self.joined, lambda aside: self._write_joined(aside, labels))
        shutil.rmtree(self.folder / ENTRIES, ignore_errors=True)

    def _write_joined(self, path: Path, labels: np.ndarray) -> None:
        shape = self._load(0).shape[1:]
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            with archive.open(zipfile.ZipInfo("arr_0.npy"), "w", force_zip64=True) as member:
                header = {"descr": "|u1", "fortran_order": False, "shape": (self.drawing.num, *shape)}
                np.lib.format.write_array_header_1_0(member, header)
                for part in self._parts(shape):
                    member.write(part.tobytes())
            with archive.open(zipfile.ZipInfo("arr_1.npy"), "w") as member:
                np.lib.format.write_array(member, labels)

    def _parts(self, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
        for shard in self._all():
            images = self._load(shard)
            if images.shape != (len(self.numbers(shard)), *shape) or images.dtype != np.uint8:
                raise DataError(str(self._path(shard)), f"holds {images.shape} {images.dtype}", "remove it, run again")
            yield images

    def _load(self, shard: int) -> np.ndarray:
        try:
            return np.load(self._path(shard), allow_pickle=False)
        except (ValueError, OSError, EOFError) as error:
            raise DataError(str(self._path(shard)), f"is damaged: {error}", "remove it, and run again") from None

    def _path(self, shard: int) -> Path:
        return self.folder / ENTRIES / f"{shard:06d}.npy"


def read_drawing(folder: Path) -> dict[str, Any] | None:
    """Return the content of drawing.json in ``folder``, or None if it is missing or unreadable."""
    try:
        content = json.loads((folder / DRAWING).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def draw_missing(
    shards: Shards,
    files: Sequence[int],
    labels: np.ndarray,
    model: tuple[Any, ModelConfig],
    request: SampleRequest,
    prompts: Sequence[str] = (),
) -> None:
    """Generate ``files`` of ``shards``, one after another.

    labels: (num,), those of all images; prompts: the prompt of each label, for a text-conditional model.
    """
    for shard in files:
        numbers = shards.numbers(shard)
        shard_labels = labels[numbers].tolist()
        values = {"caption": [prompts[label] for label in shard_labels]} if prompts else {"label": shard_labels}
        conditions = SampleConditions(values, first_number=int(numbers[0]))
        shards.write(shard, generate(*model, conditions, request))
