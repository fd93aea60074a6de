"""The images that ``mm-dit evaluate`` scores: check the request, generate them on several ranks, and read them back."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shutil
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from mindspeed_mm_dit.checkpoint.lora import parse
from mindspeed_mm_dit.checkpoint.store import find_checkpoint, without_folders
from mindspeed_mm_dit.cli.sample import request_of
from mindspeed_mm_dit.configs.files import digest_of_files, replace_file
from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.data.order import Stream, generator
from mindspeed_mm_dit.errors import ConfigError, DataError
from mindspeed_mm_dit.sampling.conditions import SampleConditions
from mindspeed_mm_dit.sampling.request import ModelRequest, SampleRequest
from mindspeed_mm_dit.terminal import echo, progress
from mindspeed_mm_dit.tools.evaluate.image_set import ImageSet, open_image_set

if TYPE_CHECKING:
    from mindspeed_mm_dit.sampling.load import CheckpointDescription

PUBLISHED_CFG_SCALE = 1.5
"""Guidance scale of DiT's published FIDs."""

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
        content = without_folders(json.loads(json.dumps(asdict(self))))
        return {name: value for name, value in content.items() if value or name not in _MAY_BE_EMPTY}


def draw_labels(rule: LabelRule, num: int, num_classes: int, seed: int) -> np.ndarray:
    """Return the label of each of ``num`` images, (num,) int64; the label of an image does not depend on ``num``."""
    if rule == "equal":
        return np.arange(num, dtype=np.int64) % num_classes
    return np.array([generator(seed, Stream.SAMPLE_LABEL, n).integers(num_classes) for n in range(num)], np.int64)


class Shards:
    """The folder of one drawing; image n depends only on the drawing and n, not on the rank that generates it, or when.

    drawing.json         the settings that determine the images: a folder is continued only if they are the same
    images/000000.npy    images 0 ... 249, (250, H, W, C) uint8; a file gets its name when it is complete
    samples.npz          all images and their labels, once all exist; the files are then removed
    """

    def __init__(self, folder: Path, drawing: Drawing) -> None:
        """Open ``folder``, which may be new, empty, or of the same drawing.

        Raises:
            ConfigError: it holds the images of another drawing; the settings that differ are named.
        """
        self.folder, self.drawing, self.joined = folder, drawing, folder / JOINED
        stored, current, what = without_folders(read_drawing(folder)), drawing.as_json(), f"--output = {folder}"
        if stored is None:
            if self.joined.exists() or any(folder.glob(f"{ENTRIES}/*.npy")):
                raise ConfigError(f"{what} holds images, but no {DRAWING} that describes them. Name another folder.")
        elif stored != current:
            differ = [name for name in sorted({*stored, *current}) if stored.get(name) != current.get(name)]
            words = [f"{name} was {stored.get(name)!r}, is {current.get(name)!r}" for name in differ if name != "model"]
            raise ConfigError(
                f"{what} holds images of another evaluation: {'; '.join(words) or 'model.json or --size is another'}. "
                "Name another folder, or repeat its settings to continue it."
            )

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
                f"{self.folder}/{ENTRIES} lacks {len(missing)} of its files, {self._path(missing[0]).name} first. Name "
                "an --output on a disk that all machines share."
            )
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
                raise DataError(
                    f"{self._path(shard)} holds {images.shape} {images.dtype} instead of its images. Remove it, and "
                    "run again."
                )
            yield images

    def _load(self, shard: int) -> np.ndarray:
        try:
            return np.load(self._path(shard), allow_pickle=False)
        except (ValueError, OSError, EOFError) as error:
            raise DataError(f"{self._path(shard)} is damaged: {error}. Remove it, and run again.") from None

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
    from mindspeed_mm_dit.sampling.generate import generate  # (only after activate)

    for shard in files:
        numbers = shards.numbers(shard)
        shard_labels = labels[numbers].tolist()
        values = {"caption": [prompts[label] for label in shard_labels]} if prompts else {"label": shard_labels}
        shards.write(shard, generate(*model, SampleConditions(values, first_number=int(numbers[0])), request))


@dataclass(frozen=True)
class Work:
    """A checked request for images, with its settings and output files."""

    described: CheckpointDescription
    """The checkpoint: the newest of its folder when the request was checked."""
    config: ModelConfig
    """Its model.json, with the size of the samples."""
    request: SampleRequest
    shards: Shards
    labels: np.ndarray
    """(num,) int64; the index of the prompt for a text-conditional model."""
    num_classes: int
    """Number of classes of the model, or of prompts."""
    classes: tuple[str, ...]
    """Names of the classes, if known; or the prompts."""

    @classmethod
    def of(cls, args: argparse.Namespace) -> Work:
        """Check all flags before weights are read."""
        from mindspeed_mm_dit.sampling.generate import resized, with_defaults
        from mindspeed_mm_dit.sampling.load import describe

        described = describe(ModelRequest.from_flags(args))
        config, classes = described.config, described.classes
        of_captions = config.predictor.conditions.items == ("caption",) and len(config.latent_shape) == 3
        if of_captions:
            classes = tuple(_prompts(args, config))
            num_classes = len(classes)
        else:
            num_classes = config.require_labelled_images(f"--checkpoint = {args.checkpoint}").num_classes
        if args.prompts is not None and not of_captions:
            raise ConfigError(f"--prompts = {args.prompts} has no effect, as this model takes classes. Leave it out.")
        request = request_of(args)
        config = resized(config, None, request.size)
        request = with_defaults(request, config, cfg_scale=PUBLISHED_CFG_SCALE)
        shards = Shards(Path(args.output), _drawing(args, described.path, config, request))
        _check_disk_space(args, config, shards)
        labels = draw_labels(args.labels, args.num, num_classes, args.seed)
        return cls(described, config, request, shards, labels, num_classes, classes)

    @property
    def prompts(self) -> tuple[str, ...]:
        """The prompt of each label; empty for a model of classes."""
        return self.classes if self.shards.drawing.prompts_sha256 else ()


def _prompts(args: argparse.Namespace, config: ModelConfig) -> list[str]:
    """Return the prompts in the file of --prompts, checked against the text encoders."""
    if args.reference == "digits":
        raise ConfigError(
            "--reference = digits is for class-conditional models, and this one is text-conditional. A run on "
            "captioned_digits prints its score at the end (--report)."
        )
    from mindspeed_mm_dit.sampling.conditions import check_prompts, read_prompts

    if args.prompts is None:
        raise ConfigError("--prompts is missing, and this model takes text. Name a file of one prompt per line.")
    prompts = read_prompts("--prompts", args.prompts)
    check_prompts(config, prompts, "--prompts")
    return prompts


def _drawing(args: argparse.Namespace, checkpoint: Path, config: ModelConfig, request: SampleRequest) -> Any:
    model = asdict(config)
    model["ae"].pop("from_pretrained", None)  # its path does not matter
    same = {name: getattr(request, name) for name in ("seed", "sampler", "steps", "bf16")}
    return Drawing(
        num=args.num,
        labels=args.labels,
        options=dict(request.options),
        cfg_scale=request.guidance,
        cfg_channels=request.channels,
        cfg_rescale=request.rescale or "",
        cfg_interval=list(request.interval),
        weights=args.weights,
        checkpoint_sha256=digest_of_files(str(checkpoint)),
        autoencoder_sha256=config.ae.digest(),
        adapters=_adapters(args.lora),
        model=model,
        ai_framework=args.ai_framework,
        weaker_sha256=_digest_of_weaker(args.guidance_checkpoint),
        prompts_sha256=hashlib.sha256(Path(args.prompts).read_bytes()).hexdigest() if args.prompts else "",
        **same,
    )


def _digest_of_weaker(checkpoint: str | None) -> str:
    return "" if checkpoint is None else digest_of_files(str(find_checkpoint(checkpoint, "--guidance-checkpoint")))


def _adapters(texts: Sequence[str]) -> list[str]:
    """Return digest and strength of each adapter of --lora."""
    named = [parse(text, "--lora") for text in texts]
    return [f"{digest_of_files(str(find_checkpoint(path, '--lora')))}:{strength:g}" for path, strength in named]


def shape_of(config: ModelConfig) -> tuple[int, int, int]:
    """Return height, width and channels of the generated images."""
    height, width = config.sample_size
    return height, width, config.ae.channels


def _check_disk_space(args: argparse.Namespace, config: ModelConfig, shards: Shards) -> None:
    """Raise ConfigError if the disk cannot hold the images twice: in separate files, and joined."""
    if shards.joined.exists():
        return
    existing = next(folder for folder in (shards.folder, *shards.folder.absolute().parents) if folder.exists())
    need, free = 2 * args.num * math.prod(shape_of(config)), shutil.disk_usage(existing).free
    if need > free + sum(file.stat().st_size for file in shards.folder.glob("images/*.npy")):
        raise ConfigError(
            f"--num = {args.num} images need {need / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB are free in --output "
            f"= {args.output}. Name a folder on a larger disk, or generate fewer."
        )


def draw(args: argparse.Namespace, work: Work) -> None:
    """Generate the missing images, each rank a part of the files, and join the files."""
    from mindspeed_mm_dit.framework import runtime
    from mindspeed_mm_dit.sampling.load import load_model

    rank, ranks = runtime.rank(), runtime.world_size()
    if ranks > 1:
        runtime.initialize(None, 1, ranks)
    missing = work.shards.missing()
    mine = missing[rank::ranks]
    images, started = sum(len(work.shards.numbers(file)) for file in missing), time.perf_counter()
    model = load_model(work.described, bf16=args.bf16, torch_compile=args.torch_compile) if mine else None
    if rank == 0:
        work.shards.begin()
    runtime.barrier()  # (no rank writes before all have looked)
    if mine:
        steps = (work.request.steps or 0) * sum(len(work.shards.numbers(file)) for file in mine)
        with progress("sampling", total=steps, unit="image-step") as bar:
            request = replace(work.request, on_step=bar.update)
            draw_missing(work.shards, mine, work.labels, (model, work.config), request, work.prompts)
    runtime.barrier()
    if rank == 0:
        work.shards.join(work.labels)
        seconds = time.perf_counter() - started
        echo(f"{args.output}: {images:,} of {args.num:,} images generated now, on {ranks} rank(s), in {seconds:.1f} s")
    if ranks > 1:
        runtime.shutdown()


def read_samples(work: Work) -> ImageSet:
    """Return the images of samples.npz; raises ConfigError if their number is wrong."""
    samples = open_image_set("--output", work.shards.joined)
    if samples.count != work.shards.drawing.num:
        raise ConfigError(
            f"{samples.what} holds {samples.count:,} images, and {work.shards.drawing.num:,} were requested. Remove "
            "the file, and run again."
        )
    return samples
