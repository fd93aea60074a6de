"""``mm-dit evaluate``: check the request, generate or read the images, and score them."""

from __future__ import annotations

import argparse
import hashlib
import io
import math
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mindspeed_mm_dit import __version__
from mindspeed_mm_dit.checkpoint.lora import parse
from mindspeed_mm_dit.checkpoint.store import find_checkpoint
from mindspeed_mm_dit.cli.sample import add_sampling_flags, request_of
from mindspeed_mm_dit.configs.files import digest_of_files
from mindspeed_mm_dit.configs.limits import check_between
from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.configs.run import check_output_file, check_output_folder
from mindspeed_mm_dit.configs.source import Size
from mindspeed_mm_dit.errors import CheckpointError, ConfigError
from mindspeed_mm_dit.framework import activate
from mindspeed_mm_dit.framework.exits import check_launched, collective_error, end_with_launcher
from mindspeed_mm_dit.sampling.conditions import MOST_IMAGES, SampleConditions
from mindspeed_mm_dit.sampling.pictures import draw_grid
from mindspeed_mm_dit.sampling.request import ModelRequest, SampleRequest, add_flags
from mindspeed_mm_dit.terminal import echo, progress
from mindspeed_mm_dit.tools.evaluate.evaluation import PAGE, REPORT, Candidates, Evaluation, Judge, cautions
from mindspeed_mm_dit.tools.evaluate.image_set import INCEPTION, ImageSet, open_image_set, sha256_of
from mindspeed_mm_dit.tools.evaluate.images_judge import DIGITS, DigitsJudge, ImagesJudge

if TYPE_CHECKING:
    from mindspeed_mm_dit.sampling.load import CheckpointDescription
    from mindspeed_mm_dit.tools.evaluate.shards import Shards


PUBLISHED_CFG_SCALE = 1.5
"""Guidance scale of DiT's published FIDs."""
GRID_FROM, GRID_CLASSES, GRID_PER_CLASS = 500, 10, 10
"""The grid shows this number of classes, and of images per class, out of this number of first images."""

MODEL_FLAGS = ("checkpoint", "model", "lora", "weights", "network_guidance", "bf16", "torch_compile", "framework")
SAMPLING_FLAGS = (
    *("size", "sampler", "steps", "guidance", "weaker", "channels", "rescale", "interval"),
    *("seed", "batch_size", "bf16"),
)
DESCRIPTION = """\
Score a model: generate many images, then compare them with real ones. With --inception you get FID, sFID, Inception
Score, precision and recall as ADM's evaluator defines them. Without it you get the fraction of the samples that a
classifier recognises as the requested class, their variety, copies of real images, and the distance to real images.

  mm-dit evaluate --checkpoint outputs/pets --num 500 --reference my_images --output report
  mm-dit evaluate --checkpoint outputs/digits/checkpoints --num 1000 --reference digits --sampler ddim --steps 50 \\
      --cfg-scale 2 --output report
  torchrun --nproc_per_node 8 -m mindspeed_mm_dit.cli.main -- evaluate --checkpoint DiT-XL-2-256x256.pt \\
      --model examples/dit/imagenet256/model.json --labels random --reference VIRTUAL_imagenet256_labeled.npz \\
      --inception weights-inception-2015-12-05-6726825d.pth --output report
  mm-dit evaluate --samples samples.npz --reference reference.npz --inception W.pth --output report
  mm-dit evaluate --statistics images/ --image-size 256 --inception W.pth --output reference.npz

If the command is interrupted, run it again to continue. The images depend neither on the number of ranks nor on an
interruption. docs/evaluation.md explains the scores, and where to get the weights."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the command."""
    add_flags(parser, ModelRequest, *MODEL_FLAGS, required=False)
    parser.add_argument(
        "--samples", metavar="PATH", help="score the images of an .npz or a folder instead of a model's"
    )
    parser.add_argument("--statistics", metavar="FOLDER", help="make a reference .npz from a folder or .npz of images")
    parser.add_argument("--num", type=int, default=50_000, metavar="N", help="images to generate (default 50000)")
    parser.add_argument(
        "--labels",
        choices=("equal", "random"),
        default="equal",
        help="equal numbers of each class (default), or a random class per image, as in DiT's published samples",
    )
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="a text file with one prompt per line, for a text-conditional model: prompts replace classes",
    )
    parser.add_argument(
        "--reference",
        metavar="PATH",
        help="real images: ADM's .npz, one made by --statistics, a folder of images, or digits",
    )
    parser.add_argument("--inception", metavar="FILE", help="weights of torch-fidelity's Inception (.pth), for FID")
    parser.add_argument("--image-size", type=int, metavar="PIXELS", help="resize images in folders to this size")
    add_sampling_flags(parser, *SAMPLING_FLAGS, cfg_scale=PUBLISHED_CFG_SCALE)
    parser.add_argument(
        "--output", required=True, metavar="PATH", help="folder of the report; with --statistics an .npz"
    )


def run(args: argparse.Namespace) -> int:
    """Generate the images that are missing, score all, and write the report."""
    end_with_launcher(os.environ)
    with collective_error():
        _check_flags(args)
        check_launched(os.environ, args.ai_framework)
        activate(args.ai_framework)
        from mindspeed_mm_dit.framework import runtime  # (only after activate)

        first = runtime.rank() == 0
        if args.statistics:
            return _make_statistics(args) if first else 0
        work = Work.of(args) if args.checkpoint else None
        samples = open_image_set("--samples", args.samples, args.image_size) if first and args.samples else None
        judge = _judge_of(args, work, samples) if first else None
    try:
        if work:
            draw(args, work)
    except CheckpointError:
        if work is None or work.described.path.exists() or runtime.world_size() > 1:
            raise
        return run(args)  # the run has deleted this checkpoint meanwhile: score the newest one
    if work:
        samples = read_samples(work) if first else None
    if judge and samples:
        _report(args, judge, samples, work)
    return 0


def _check_flags(args: argparse.Namespace) -> None:
    sources = [flag for flag in ("checkpoint", "samples", "statistics") if getattr(args, flag)]
    if len(sources) != 1:
        reason = (
            f"{' and '.join(f'--{flag}' for flag in sources)} exclude each other" if sources else "nothing to score"
        )
        raise ConfigError("mm-dit evaluate", reason, "give one of --checkpoint, --samples and --statistics")

    check_between("--num", args.num, 1, MOST_IMAGES)
    check_between("--batch-size", args.batch_size, 1, MOST_IMAGES)
    if args.image_size is not None:
        check_between("--image-size", args.image_size, 1, 1 << 14)
    if args.size is not None and not args.checkpoint:
        raise ConfigError(f"--size = {args.size}", "is for images that a model generates", "leave it out")
    if args.inception and args.ai_framework != "pytorch":
        raise ConfigError(
            f"--inception = {args.inception}",
            "is a network of PyTorch",
            "score samples.npz with --samples where PyTorch is, without --ai-framework",
        )
    if args.statistics:
        if not args.inception:
            raise ConfigError("--statistics", "are made with --inception", INCEPTION)
        if not args.output.lower().endswith(".npz"):
            raise ConfigError(f"--output = {args.output}", "of --statistics is an .npz", "name one")
        check_output_file("--output", args.output)
        return
    if not args.reference:
        raise ConfigError("--reference", "is needed", "name ADM's .npz, a folder of real images, or digits")

    if args.reference == DIGITS and args.inception:
        raise ConfigError(
            f"--inception = {args.inception}",
            f"is not used: a classifier of digits scores --reference {DIGITS}",
            "leave it out",
        )
    check_output_folder("--output", args.output, make=False)


def _make_statistics(args: argparse.Namespace) -> int:
    from mindspeed_mm_dit.tools.evaluate.inception import Inception
    from mindspeed_mm_dit.tools.evaluate.scores import check_enough, write_statistics

    images = open_image_set("--statistics", args.statistics, args.image_size)
    check_enough(images.what, images.count)
    network = Inception(args.inception)
    write_statistics(Path(args.output), images, network.features(images, args.batch_size), network)
    echo(f"{args.output}: statistics of {images.count:,} images of {images.shape[0]} x {images.shape[1]}")
    for note in cautions(images):
        echo(f"note: {note}")
    return 0


# --- images and judge ------------------------------------------------------------------------------------------


def _judge_of(args: argparse.Namespace, work: Work | None, samples: ImageSet | None) -> Judge:
    """Return the judge that the flags name, after it has checked the images, including those to be generated."""
    images = _candidates(args, work, samples)
    # for a text-conditional model, folders of the reference are not classes
    by_class = work is None or images.num_labels > 0
    size = args.image_size or images.shape[:2]
    judge = DigitsJudge() if args.reference == DIGITS else _judge_by_images(args, size, by_class)
    judge.check(images)
    return judge


def _candidates(args: argparse.Namespace, work: Work | None, samples: ImageSet | None) -> Candidates:
    if samples:
        num_labels = 0 if samples.labels is None else int(samples.labels.max()) + 1
        return Candidates(samples.what, samples.shape, samples.count, samples.what, num_labels, samples.classes)
    assert work is not None
    what = f"--checkpoint = {args.checkpoint}"
    num_labels, classes = (0, ()) if work.prompts else (work.num_classes, work.classes)
    return Candidates(what, shape_of(work.config), args.num, f"--num = {args.num}", num_labels, classes)


def _judge_by_images(args: argparse.Namespace, image_size: int | Size, by_class: bool) -> Judge:
    """Return the judge that compares with real images: through Inception features, or without them."""
    reference = open_image_set("--reference", args.reference, image_size, skip_bad=True, by_class=by_class)
    if not args.inception:
        return ImagesJudge(reference)
    from mindspeed_mm_dit.tools.evaluate.inception import Inception
    from mindspeed_mm_dit.tools.evaluate.scores import InceptionJudge

    return InceptionJudge(reference, Inception(args.inception), args.batch_size)


# --- report ----------------------------------------------------------------------------------------------------


def _report(args: argparse.Namespace, judge: Judge, samples: ImageSet, work: Work | None) -> None:
    from mindspeed_mm_dit.framework import runtime

    folder = Path(args.output)
    for name in (PAGE, REPORT):  # (of an earlier evaluation, so that no stale result remains)
        (folder / name).unlink(missing_ok=True)
    drawing = work.shards.drawing.as_json() | {"checkpoint": args.checkpoint} if work else None
    evaluation = Evaluation(
        images=drawing or {"samples": args.samples, "sha256": sha256_of(args.samples), "num": samples.count},
        judgement=judge.judge(samples),
        reference_sha256="" if args.reference == DIGITS else sha256_of(args.reference),
        versions={"mindspeed_mm_dit": __version__, **runtime.versions()},
        computed={
            "ranks": runtime.world_size(),
            "batch_size": args.batch_size,
            "torch_compile": args.torch_compile,
            "device": runtime.device_name(),
        },
    )
    folder.mkdir(parents=True, exist_ok=True)
    evaluation.write(folder, _grid(samples, work.classes if work else ()))
    echo("\n".join(evaluation.lines()))
    echo(f"{folder / PAGE}  {folder / REPORT}" + (f"  {work.shards.joined}" if work else ""))


def _grid(samples: ImageSet, classes: tuple[str, ...]) -> bytes:
    """Return a PNG of some of the samples, one row per class."""
    images = next(samples.batches(min(GRID_FROM, samples.count)))
    labels = np.zeros(len(images), np.int64) if samples.labels is None else samples.labels[: len(images)]
    order = np.argsort(labels, kind="stable")
    order = order[np.isin(labels[order], np.unique(labels)[:GRID_CLASSES])]
    png = io.BytesIO()
    titles = SampleConditions({"label": labels[order].tolist()}).titles(classes)
    draw_grid(images[order], titles, GRID_PER_CLASS).save(png, "PNG")
    return png.getvalue()


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
        from mindspeed_mm_dit.sampling.load import describe
        from mindspeed_mm_dit.sampling.plan import resized, with_defaults
        from mindspeed_mm_dit.tools.evaluate.shards import Shards, draw_labels

        described = describe(ModelRequest.from_flags(args))
        config, classes = described.config, described.classes
        of_captions = config.predictor.conditions.items == ("caption",) and len(config.latent_shape) == 3
        if of_captions:
            classes = tuple(_prompts(args, config))
            num_classes = len(classes)
        else:
            num_classes = config.require_labelled_images(f"--checkpoint = {args.checkpoint}").num_classes
        if args.prompts is not None and not of_captions:
            raise ConfigError(f"--prompts = {args.prompts}", "this model is conditioned on classes", "leave it out")
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
            "--reference = digits",
            "is for class-conditional models, and this one is text-conditional",
            "a run on captioned_digits prints its score at the end (--report)",
        )
    from mindspeed_mm_dit.sampling.conditions import check_prompts, read_prompts

    if args.prompts is None:
        cure = "name a text file with one prompt per line"
        raise ConfigError("--prompts", "is missing: this model is conditioned on text", cure)
    prompts = read_prompts("--prompts", args.prompts)
    check_prompts(config, prompts, "--prompts")
    return prompts


def _drawing(args: argparse.Namespace, checkpoint: Path, config: ModelConfig, request: SampleRequest) -> Any:
    from mindspeed_mm_dit.tools.evaluate.shards import Drawing

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
            f"--output = {args.output}",
            f"{args.num:,} images need {need / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB are free",
            "name a folder on a larger disk, or generate fewer",
        )


def draw(args: argparse.Namespace, work: Work) -> None:
    """Generate the missing images, each rank a part of the files, and join the files."""
    from mindspeed_mm_dit.framework import runtime
    from mindspeed_mm_dit.sampling.load import load_model
    from mindspeed_mm_dit.tools.evaluate.shards import draw_missing

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
        words = f"holds {samples.count:,} images, and {work.shards.drawing.num:,} were requested"
        raise ConfigError(samples.what, words, "remove the file, and run again")
    return samples
