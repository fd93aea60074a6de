"""``mm-dit evaluate``."""

from __future__ import annotations

import argparse
import hashlib
import io
import math
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_mm_dit.cli.asking import MOST_IMAGES
from mindspeed_mm_dit.cli.ranks import found_by_all
from mindspeed_mm_dit.cli.sample import add_chain, add_drawing, add_model, settings_of
from mindspeed_mm_dit.cli.sampler_flags import add_sampler_options
from mindspeed_mm_dit.configs.limits import check_between
from mindspeed_mm_dit.configs.outputs import check_output_file, check_output_folder
from mindspeed_mm_dit.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

    from mindspeed_mm_dit.checkpoint.lora.source import Strong
    from mindspeed_mm_dit.configs.model import ModelConfig
    from mindspeed_mm_dit.evaluation.evaluation import Candidates, Judge
    from mindspeed_mm_dit.evaluation.pictures import Pictures
    from mindspeed_mm_dit.sampling.generate import SampleSettings
    from mindspeed_mm_dit.sampling.shards import Shards

PUBLISHED_CFG_SCALE = 1.5
"""With which DiT's published FIDs were drawn."""
GRID_FROM, GRID_CLASSES, GRID_PER_CLASS = 500, 10, 10
"""The picture shows so many classes, and images of each, out of the first so many images."""

DESCRIPTION = """\
Score a model: draw many images, then compare them with real ones. With --inception: FID, sFID, Inception Score,
precision and recall as ADM's evaluator defines them. Without: read as asked, variety, copies, distance to real ones.

  mm-dit evaluate --checkpoint outputs/pets --num 500 --reference my_images --output report
  mm-dit evaluate --checkpoint outputs/digits/checkpoints --num 1000 --reference digits --sampler ddim --steps 50 \\
      --cfg-scale 2 --output report
  torchrun --nproc_per_node 8 -m mindspeed_mm_dit.cli.main -- evaluate --checkpoint DiT-XL-2-256x256.pt \\
      --model examples/dit/imagenet256/model.json --labels random --reference VIRTUAL_imagenet256_labeled.npz \\
      --inception weights-inception-2015-12-05-6726825d.pth --output report
  mm-dit evaluate --samples samples.npz --reference reference.npz --inception W.pth --output report
  mm-dit evaluate --statistics pictures/ --image-size 256 --inception W.pth --output reference.npz

The same command goes on where it was interrupted; images depend neither on the ranks nor on an interruption.
docs/evaluation.md says what the scores mean, and where the weights come from."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the command."""
    add_model(parser, required=False)
    parser.add_argument(
        "--samples", metavar="PATH", help="score the images of an .npz or a folder instead of a model's"
    )
    parser.add_argument("--statistics", metavar="FOLDER", help="make a reference .npz of a folder or .npz of images")
    parser.add_argument("--num", type=int, default=50_000, metavar="N", help="images to draw (default 50000)")
    parser.add_argument(
        "--labels",
        choices=("equal", "random"),
        default="equal",
        help="as many images of each class (default), or a class drawn for each image, as DiT's published samples",
    )
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="a text file with a prompt a line, for a model of captions: they stand for classes",
    )
    parser.add_argument(
        "--reference", metavar="PATH", help="ADM's .npz, one of --statistics, a folder of images, or digits"
    )
    parser.add_argument("--inception", metavar="FILE", help="weights of torch-fidelity's Inception (.pth), for FID")
    parser.add_argument("--image-size", type=int, metavar="PIXELS", help="bring pictures of folders to this size")
    add_chain(parser, PUBLISHED_CFG_SCALE)
    add_drawing(parser)
    parser.add_argument("--output", required=True, metavar="PATH", help="folder of the report; .npz of --statistics")
    add_sampler_options(parser)


def run(args: argparse.Namespace) -> int:
    """Draw what is missing, score, and write."""
    from mindspeed_mm_dit.evaluation.pictures import open_pictures
    from mindspeed_mm_dit.framework import activate
    from mindspeed_mm_dit.framework.launched import check_launched, end_with_launcher

    end_with_launcher(os.environ)
    with found_by_all():
        _check_flags(args)
        check_launched(os.environ, args.ai_framework)
        activate(args.ai_framework)
        from mindspeed_mm_dit.framework import runtime  # which is the active one's

        first = runtime.rank() == 0
        if args.statistics:
            return _make_statistics(args) if first else 0
        work = _Work.of(args) if args.checkpoint else None
        samples = open_pictures("--samples", args.samples, args.image_size) if first and args.samples else None
        judge = _judge_of(args, work, samples) if first else None
    if work:
        _draw(args, work)
    if judge:
        _report(args, judge, samples or _drawn_samples(work), work)
    return 0


def _check_flags(args: argparse.Namespace) -> None:
    given = [flag for flag in ("checkpoint", "samples", "statistics") if getattr(args, flag)]
    if len(given) != 1:
        reason = f"{' and '.join(f'--{flag}' for flag in given)} exclude each other" if given else "nothing to score"
        raise ConfigError("mm-dit evaluate", reason, "give one of --checkpoint, --samples and --statistics")
    check_between("--num", args.num, 1, MOST_IMAGES)
    check_between("--batch-size", args.batch_size, 1, MOST_IMAGES)
    if args.image_size is not None:
        check_between("--image-size", args.image_size, 1, 1 << 14)
    if args.inception and args.ai_framework != "pytorch":
        raise ConfigError(
            f"--inception = {args.inception}", "is a network of PyTorch",
            "score samples.npz with --samples where PyTorch is, without --ai-framework",
        )  # fmt: skip
    if args.statistics:
        if not args.inception:
            from mindspeed_mm_dit.evaluation.pictures import INCEPTION

            raise ConfigError("--statistics", "are made with --inception", INCEPTION)
        if not args.output.lower().endswith(".npz"):
            raise ConfigError(f"--output = {args.output}", "of --statistics is an .npz", "name one")
        check_output_file("--output", args.output)
        return
    if not args.reference:
        raise ConfigError("--reference", "is needed", "name ADM's .npz, a folder of real images, or digits")
    check_output_folder("--output", args.output, make=False)


def _make_statistics(args: argparse.Namespace) -> int:
    from mindspeed_mm_dit.evaluation.cautions import cautions
    from mindspeed_mm_dit.evaluation.inception import Inception
    from mindspeed_mm_dit.evaluation.pictures import open_pictures
    from mindspeed_mm_dit.evaluation.scores import check_enough, write_statistics

    pictures = open_pictures("--statistics", args.statistics, args.image_size)
    check_enough(pictures.what, pictures.count)
    network = Inception(args.inception)
    write_statistics(Path(args.output), pictures, network.features(pictures, args.batch_size), network)
    print(f"{args.output}: statistics of {pictures.count:,} images of {pictures.shape[0]} x {pictures.shape[1]}")
    for note in cautions(pictures):
        print(f"note: {note}")
    return 0


# --- what is scored, and by what -------------------------------------------------------------------------------


def _judge_of(args: argparse.Namespace, work: _Work | None, samples: Pictures | None) -> Judge:
    """Return the judge that the flags name, who has looked at what is there, or will be."""
    from mindspeed_mm_dit.evaluation.digits_judge import DIGITS, DigitsJudge

    images = _candidates(args, work, samples)
    judge = DigitsJudge() if args.reference == DIGITS else _judge_by_images(args, args.image_size or images.shape[0])
    judge.check(images)
    return judge


def _candidates(args: argparse.Namespace, work: _Work | None, samples: Pictures | None) -> Candidates:
    from mindspeed_mm_dit.evaluation.evaluation import Candidates

    if samples:
        num_labels = 0 if samples.labels is None else int(samples.labels.max()) + 1
        return Candidates(samples.what, samples.shape, samples.count, samples.what, num_labels, samples.classes)
    assert work is not None
    what = f"--checkpoint = {args.checkpoint}"
    num_labels, classes = (0, ()) if work.prompts else (work.num_classes, work.classes)
    return Candidates(what, _shape(work.config), args.num, f"--num = {args.num}", num_labels, classes)


def _judge_by_images(args: argparse.Namespace, image_size: int) -> Judge:
    """Return the judge that holds real images: through the Inception, or through what they have in common."""
    from mindspeed_mm_dit.evaluation.images_judge import ImagesJudge
    from mindspeed_mm_dit.evaluation.pictures import open_pictures

    reference = open_pictures("--reference", args.reference, image_size)
    if not args.inception:
        return ImagesJudge(reference)
    from mindspeed_mm_dit.evaluation.inception import Inception
    from mindspeed_mm_dit.evaluation.scores import InceptionJudge

    return InceptionJudge(reference, Inception(args.inception), args.batch_size)


def _drawn_samples(work: _Work | None) -> Pictures:
    """Return the images of samples.npz, all that were asked for."""
    from mindspeed_mm_dit.evaluation.pictures import open_pictures

    assert work is not None
    samples = open_pictures("--output", work.shards.joined)
    if samples.count != work.shards.drawing.num:
        words = f"holds {samples.count:,} images, and {work.shards.drawing.num:,} were asked for"
        raise ConfigError(samples.what, words, "remove the file, and run again")
    return samples


@dataclass(frozen=True)
class _Work:
    """A drawing to be made."""

    config: ModelConfig
    settings: SampleSettings
    shards: Shards
    labels: np.ndarray
    """(num,) int64; of a model of captions the number of the prompt."""
    num_classes: int
    """Classes of the model, or prompts."""
    classes: tuple[str, ...]
    """Their names, where they are known; or the prompts."""
    adapters: Sequence[Strong]
    """What --lora adds to the weights."""

    @classmethod
    def of(cls, args: argparse.Namespace) -> _Work:
        """Check all that the flags ask for, before weights are read."""
        from mindspeed_mm_dit.sampling.load import describe, load_adapters
        from mindspeed_mm_dit.sampling.shards import Shards, draw_labels

        path, config, classes = describe(args.checkpoint, args.model)
        of_captions = config.predictor.conditions.items == ("caption",) and len(config.latent_shape) == 3
        if of_captions:
            classes = tuple(_prompts(args, config))
            num_classes = len(classes)
        else:
            num_classes = config.require_labelled_images(f"--checkpoint = {args.checkpoint}").num_classes
        if args.prompts is not None and not of_captions:
            raise ConfigError(f"--prompts = {args.prompts}", "this model is steered by classes", "leave it out")
        settings = settings_of(args, config)
        shards = Shards(Path(args.output), _drawing(args, path, config, settings))
        _check_room(args, config, shards)
        labels = draw_labels(args.labels, args.num, num_classes, args.seed)
        return cls(config, settings, shards, labels, num_classes, classes, load_adapters(args.lora, config))

    @property
    def prompts(self) -> tuple[str, ...]:
        """What is asked for, by label; empty where labels themselves are."""
        return self.classes if self.shards.drawing.prompts_sha256 else ()


def _prompts(args: argparse.Namespace, config: ModelConfig) -> list[str]:
    """Return the prompts of the file that the flag names, each of which the text encoders can read."""
    from mindspeed_mm_dit.cli.asking import check_prompts, prompts_of

    if args.reference == "digits":
        raise ConfigError("--reference = digits", "is for models of classes, and this one is of captions",
                          "a run on captioned_digits ends with a score of its own (--report)")  # fmt: skip
    prompts = prompts_of([], args.prompts, "--prompts")
    check_prompts(config, prompts, None, "--prompts")
    return prompts


def _drawing(args: argparse.Namespace, checkpoint: Path, config: ModelConfig, settings: SampleSettings) -> Any:
    from mindspeed_mm_dit.configs.files import digest_of_files
    from mindspeed_mm_dit.sampling.shards import Drawing

    model = asdict(config)
    model["ae"].pop("from_pretrained", None)  # where it lies is no matter
    guidance = settings.guidance
    return Drawing(
        num=args.num, labels=args.labels, seed=settings.seed, sampler=settings.sampler, steps=settings.steps,
        options=dict(settings.options), cfg_scale=guidance.scale, cfg_channels=guidance.channels,
        cfg_interval=list(guidance.interval), weights=args.weights, checkpoint_sha256=digest_of_files(str(checkpoint)),
        autoencoder_sha256=config.ae.digest(), adapters=_adapters(args.lora), model=model, bf16=settings.bf16,
        ai_framework=args.ai_framework, weaker_sha256=_digest_of_weaker(args.guidance_checkpoint),
        prompts_sha256=hashlib.sha256(Path(args.prompts).read_bytes()).hexdigest() if args.prompts else "",
    )  # fmt: skip


def _digest_of_weaker(checkpoint: str | None) -> str:
    from mindspeed_mm_dit.checkpoint.store import find_checkpoint
    from mindspeed_mm_dit.configs.files import digest_of_files

    return "" if checkpoint is None else digest_of_files(str(find_checkpoint(checkpoint, "--guidance-checkpoint")))


def _adapters(given: Sequence[str]) -> list[str]:
    """Return what decides the adapters that --lora names: digest and strength of each."""
    from mindspeed_mm_dit.checkpoint.lora.source import parse
    from mindspeed_mm_dit.checkpoint.store import find_checkpoint
    from mindspeed_mm_dit.configs.files import digest_of_files

    named = [parse(text, "--lora") for text in given]
    return [f"{digest_of_files(str(find_checkpoint(path, '--lora')))}:{strength:g}" for path, strength in named]


def _shape(config: ModelConfig) -> tuple[int, int, int]:
    """Return height, width and channels of the images that are drawn."""
    height, width = config.sample_size
    return height, width, config.ae.channels


def _check_room(args: argparse.Namespace, config: ModelConfig, shards: Shards) -> None:
    """Raise ConfigError for a disk that cannot take the images twice: in files, and joined."""
    if shards.joined.exists():
        return
    place = next(folder for folder in (shards.folder, *shards.folder.absolute().parents) if folder.exists())
    need, free = 2 * args.num * math.prod(_shape(config)), shutil.disk_usage(place).free
    if need > free + sum(file.stat().st_size for file in shards.folder.glob("images/*.npy")):
        raise ConfigError(
            f"--output = {args.output}",
            f"{args.num:,} images need {need / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB are free",
            "name a folder on a larger disk, or draw fewer",
        )


# --- the work --------------------------------------------------------------------------------------------------


def _draw(args: argparse.Namespace, work: _Work) -> None:
    """Draw what is missing, a share of the files on each rank, and join the files."""
    from tqdm import tqdm

    from mindspeed_mm_dit.framework import runtime
    from mindspeed_mm_dit.sampling.load import load_model
    from mindspeed_mm_dit.sampling.shards import draw_missing

    rank, ranks = runtime.rank(), runtime.world_size()
    if ranks > 1:
        runtime.initialize(None, 1, ranks)
    if rank == 0:
        work.shards.begin()
    missing = work.shards.missing()
    runtime.barrier()  # every rank has looked before one writes
    mine = missing[rank::ranks]
    images, started = sum(len(work.shards.numbers(file)) for file in missing), time.perf_counter()
    if mine:
        model = load_model(
            args.checkpoint,
            args.model,
            args.weights == "ema",
            work.adapters,
            bf16=args.bf16,
            torch_compile=args.torch_compile,
        )
        share = sum(len(work.shards.numbers(file)) for file in mine)
        with tqdm(
            total=work.settings.steps * share, desc="sampling", unit="image-step",
            disable=rank > 0 or not sys.stderr.isatty(),
        ) as bar:  # fmt: skip
            draw_missing(work.shards, mine, work.labels, model, work.settings, bar.update, work.prompts)
    runtime.barrier()
    if rank == 0:
        work.shards.join(work.labels)
        seconds = time.perf_counter() - started
        print(f"{args.output}: {images:,} of {args.num:,} images drawn now, on {ranks} rank(s), in {seconds:.1f} s")
    if ranks > 1:
        runtime.shutdown()


def _report(args: argparse.Namespace, judge: Judge, samples: Pictures, work: _Work | None) -> None:
    from mindspeed_mm_dit import __version__
    from mindspeed_mm_dit.evaluation.digits_judge import DIGITS
    from mindspeed_mm_dit.evaluation.evaluation import PAGE, REPORT, Evaluation
    from mindspeed_mm_dit.evaluation.pictures import sha256_of
    from mindspeed_mm_dit.framework import runtime

    folder = Path(args.output)
    for name in (PAGE, REPORT):  # of an evaluation before: what stands there is what was found last
        (folder / name).unlink(missing_ok=True)
    drawn = work.shards.drawing.as_json() | {"checkpoint": args.checkpoint} if work else None
    evaluation = Evaluation(
        images=drawn or {"samples": args.samples, "sha256": sha256_of(args.samples), "num": samples.count},
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
    print("\n".join(evaluation.lines()))
    print(f"{folder / PAGE}  {folder / REPORT}" + (f"  {work.shards.joined}" if work else ""))


def _grid(samples: Pictures, classes: tuple[str, ...]) -> bytes:
    """Return a PNG of some of the samples, one row a class."""
    import numpy as np

    from mindspeed_mm_dit.sampling.asked import Asked
    from mindspeed_mm_dit.sampling.grid import draw_grid

    images = next(samples.batches(min(GRID_FROM, samples.count)))
    labels = np.zeros(len(images), np.int64) if samples.labels is None else samples.labels[: len(images)]
    shown = np.argsort(labels, kind="stable")
    shown = shown[np.isin(labels[shown], np.unique(labels)[:GRID_CLASSES])]
    png = io.BytesIO()
    titles = Asked({"label": labels[shown].tolist()}).titles(classes)
    draw_grid(images[shown], titles, GRID_PER_CLASS).save(png, "PNG")
    return png.getvalue()
