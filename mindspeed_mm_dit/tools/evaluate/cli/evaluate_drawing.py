"""The images that ``mm-dit evaluate`` scores: check the request, generate the images, and read them back."""

from __future__ import annotations

import argparse
import hashlib
import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mindspeed_mm_dit.checkpoint.lora.source import ScaledLora, parse
from mindspeed_mm_dit.checkpoint.store import find_checkpoint, of_newest
from mindspeed_mm_dit.cli.request_flags import check_prompts, prompts_of
from mindspeed_mm_dit.cli.sample import load_asked, settings_of
from mindspeed_mm_dit.configs.files import digest_of_files
from mindspeed_mm_dit.configs.limits import check_path
from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.sampling.request import resized
from mindspeed_mm_dit.terminal import echo, progress
from mindspeed_mm_dit.tools.evaluate.image_set import ImageSet, open_image_set

if TYPE_CHECKING:
    from mindspeed_mm_dit.sampling.generate import SampleSettings
    from mindspeed_mm_dit.tools.evaluate.shards import Shards


@dataclass(frozen=True)
class Work:
    """A checked request for images, with its settings and output files."""

    checkpoint: Path
    """The checkpoint, resolved to the newest of its folder when the request was checked."""
    config: ModelConfig
    settings: SampleSettings
    shards: Shards
    labels: np.ndarray
    """(num,) int64; the index of the prompt for a text-conditional model."""
    num_classes: int
    """Number of classes of the model, or of prompts."""
    classes: tuple[str, ...]
    """Names of the classes, if known; or the prompts."""
    adapters: Sequence[ScaledLora]
    """Adapters that --lora adds to the weights."""

    @classmethod
    def of(cls, args: argparse.Namespace) -> Work:
        """Check all flags before weights are read."""
        check_path("--checkpoint", args.checkpoint)
        return of_newest(args.checkpoint, "--checkpoint", lambda path: cls._checked(args, path))

    @classmethod
    def _checked(cls, args: argparse.Namespace, checkpoint: Path) -> Work:
        from mindspeed_mm_dit.sampling.load import describe, load_adapters
        from mindspeed_mm_dit.tools.evaluate.shards import Shards, draw_labels

        path, config, classes, *_ = describe(checkpoint, args.model)
        of_captions = config.predictor.conditions.items == ("caption",) and len(config.latent_shape) == 3
        if of_captions:
            classes = tuple(_prompts(args, config))
            num_classes = len(classes)
        else:
            num_classes = config.require_labelled_images(f"--checkpoint = {args.checkpoint}").num_classes
        if args.prompts is not None and not of_captions:
            raise ConfigError(f"--prompts = {args.prompts}", "this model is conditioned on classes", "leave it out")
        config = resized(config, None, args.size)
        settings = settings_of(args, config)
        shards = Shards(Path(args.output), _drawing(args, path, config, settings))
        _check_disk_space(args, config, shards)
        labels = draw_labels(args.labels, args.num, num_classes, args.seed)
        return cls(path, config, settings, shards, labels, num_classes, classes, load_adapters(args.lora, config))

    @property
    def prompts(self) -> tuple[str, ...]:
        """The prompt of each label; empty for a model of classes."""
        return self.classes if self.shards.drawing.prompts_sha256 else ()


def _prompts(args: argparse.Namespace, config: ModelConfig) -> list[str]:
    """Return the prompts in the file of --prompts, checked against the text encoders."""
    if args.reference == "digits":
        raise ConfigError("--reference = digits", "is for class-conditional models, and this one is text-conditional",
                          "a run on captioned_digits prints its score at the end (--report)")  # fmt: skip
    prompts = prompts_of([], args.prompts, "--prompts")
    check_prompts(config, prompts, None, "--prompts")
    return prompts


def _drawing(args: argparse.Namespace, checkpoint: Path, config: ModelConfig, settings: SampleSettings) -> Any:
    from mindspeed_mm_dit.tools.evaluate.shards import Drawing

    model = asdict(config)
    model["ae"].pop("from_pretrained", None)  # its path does not matter
    guidance = settings.guidance
    return Drawing(
        num=args.num, labels=args.labels, seed=settings.seed, sampler=settings.sampler, steps=settings.steps,
        options=dict(settings.options), cfg_scale=guidance.scale, cfg_channels=guidance.channels,
        cfg_rescale=guidance.rescale or "",
        cfg_interval=list(guidance.interval), weights=args.weights, checkpoint_sha256=digest_of_files(str(checkpoint)),
        autoencoder_sha256=config.ae.digest(), adapters=_adapters(args.lora), model=model, bf16=settings.bf16,
        ai_framework=args.ai_framework, weaker_sha256=_digest_of_weaker(args.guidance_checkpoint),
        prompts_sha256=hashlib.sha256(Path(args.prompts).read_bytes()).hexdigest() if args.prompts else "",
    )  # fmt: skip


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
            f"--output = {args.output}",
            f"{args.num:,} images need {need / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB are free",
            "name a folder on a larger disk, or generate fewer",
        )


def draw(args: argparse.Namespace, work: Work) -> None:
    """Generate the missing images, each rank a part of the files, and join the files."""
    from mindspeed_mm_dit.framework import runtime
    from mindspeed_mm_dit.tools.evaluate.shards import draw_missing

    rank, ranks = runtime.rank(), runtime.world_size()
    if ranks > 1:
        runtime.initialize(None, 1, ranks)
    missing = work.shards.missing()
    mine = missing[rank::ranks]
    images, started = sum(len(work.shards.numbers(file)) for file in missing), time.perf_counter()
    model = load_asked(args, work.adapters, work.checkpoint)[0] if mine else None
    if rank == 0:
        work.shards.begin()
    runtime.barrier()  # (no rank writes before all have looked)
    if mine:
        steps = work.settings.steps * sum(len(work.shards.numbers(file)) for file in mine)
        with progress("sampling", total=steps, unit="image-step") as bar:
            draw_missing(work.shards, mine, work.labels, (model, work.config), work.settings, bar.update, work.prompts)
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
        words = f"holds {samples.count:,} images, and {work.shards.drawing.num:,} were requested"
        raise ConfigError(samples.what, words, "remove the file, and run again")
    return samples
