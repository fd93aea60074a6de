"""``mm-dit evaluate``."""

from __future__ import annotations

import argparse
import io
import os
from pathlib import Path

import numpy as np

from mindspeed_mm_dit import __version__
from mindspeed_mm_dit.cli.sample import add_sampling_flags
from mindspeed_mm_dit.configs.limits import check_between
from mindspeed_mm_dit.configs.run import check_output_file, check_output_folder
from mindspeed_mm_dit.configs.source import Size
from mindspeed_mm_dit.errors import CheckpointError, ConfigError
from mindspeed_mm_dit.framework import activate
from mindspeed_mm_dit.framework.exits import check_launched, collective_error, end_with_launcher
from mindspeed_mm_dit.sampling.conditions import MAX_IMAGES, SampleConditions
from mindspeed_mm_dit.sampling.pictures import draw_grid
from mindspeed_mm_dit.sampling.request import ModelRequest, add_flags
from mindspeed_mm_dit.terminal import echo
from mindspeed_mm_dit.tools.evaluate.digits import DIGITS, DigitsJudge
from mindspeed_mm_dit.tools.evaluate.drawing import PUBLISHED_CFG_SCALE, Work, draw, read_samples, shape_of
from mindspeed_mm_dit.tools.evaluate.evaluation import PAGE, REPORT, Candidates, Evaluation, Judge, cautions
from mindspeed_mm_dit.tools.evaluate.image_set import INCEPTION, ImageSet, open_image_set, sha256_of
from mindspeed_mm_dit.tools.evaluate.images_judge import ImagesJudge

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
    add = parser.add_argument
    add_flags(parser, ModelRequest, *MODEL_FLAGS, required=False)
    add("--samples", metavar="PATH", help="score the images of an .npz or a folder instead of a model's")
    add("--statistics", metavar="FOLDER", help="make a reference .npz from a folder or .npz of images")
    add("--num", type=int, default=50_000, metavar="N", help="images to generate (default 50000)")
    words = "equal numbers of each class (default), or a random class per image, as in DiT's published samples"
    add("--labels", choices=("equal", "random"), default="equal", help=words)
    words = "a text file with one prompt per line, for a text-conditional model: prompts replace classes"
    add("--prompts", metavar="FILE", help=words)
    words = "real images: ADM's .npz, one made by --statistics, a folder of images, or digits"
    add("--reference", metavar="PATH", help=words)
    add("--inception", metavar="FILE", help="weights of torch-fidelity's Inception (.pth), for FID")
    add("--image-size", type=int, metavar="PIXELS", help="resize images in folders to this size")
    add_sampling_flags(parser, *SAMPLING_FLAGS, cfg_scale=PUBLISHED_CFG_SCALE)
    add("--output", required=True, metavar="PATH", help="folder of the report; with --statistics an .npz")


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
        given = f"{' and '.join(f'--{flag}' for flag in sources)} exclude each other."
        problem = given if sources else "mm-dit evaluate has nothing to score."
        raise ConfigError(f"{problem} Give one of --checkpoint, --samples and --statistics.")
    check_between("--num", args.num, 1, MAX_IMAGES)
    check_between("--batch-size", args.batch_size, 1, MAX_IMAGES)
    if args.image_size is not None:
        check_between("--image-size", args.image_size, 1, 1 << 14)
    if args.size is not None and not args.checkpoint:
        raise ConfigError(f"--size = {args.size} is for images that a model generates. Leave it out.")
    if args.inception and args.ai_framework != "pytorch":
        raise ConfigError(
            f"--inception = {args.inception} is a network of PyTorch. Score samples.npz with --samples where PyTorch "
            "is, without --ai-framework."
        )
    if args.statistics:
        if not args.inception:
            raise ConfigError(f"--statistics = {args.statistics} needs --inception. {INCEPTION}")
        if not args.output.lower().endswith(".npz"):
            raise ConfigError(f"--output = {args.output} must end in .npz with --statistics.")
        check_output_file("--output", args.output)
        return
    if not args.reference:
        raise ConfigError("--reference is missing. Name ADM's .npz, a folder of real images, or digits.")
    if args.reference == DIGITS and args.inception:
        raise ConfigError(f"--inception = {args.inception} is not used with --reference {DIGITS}. Leave it out.")
    check_output_folder("--output", args.output, make=False)


def _make_statistics(args: argparse.Namespace) -> int:
    from mindspeed_mm_dit.tools.evaluate.inception import Inception, check_enough, write_statistics

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
    from mindspeed_mm_dit.tools.evaluate.inception import Inception, InceptionJudge

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
