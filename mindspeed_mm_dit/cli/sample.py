"""``mm-dit sample``."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

from mindspeed_mm_dit.checkpoint.store import without_folders
from mindspeed_mm_dit.errors import ConfigError, UserError, flag_of
from mindspeed_mm_dit.framework import activate
from mindspeed_mm_dit.framework.exits import check_launched, collective_error, end_with_launcher
from mindspeed_mm_dit.objectives.registry import OBJECTIVES
from mindspeed_mm_dit.sampling.outputs import FPS, GeneratedSamples, Output
from mindspeed_mm_dit.sampling.request import CFG_SCALE, ModelRequest, SampleRequest, add_flags
from mindspeed_mm_dit.terminal import echo

if TYPE_CHECKING:
    from mindspeed_mm_dit.configs.condition import Conditions
    from mindspeed_mm_dit.sampling.load import CheckpointDescription

DESCRIPTION = """\
Generate images or videos with a trained model, of the classes you name or the prompts you write.

  mm-dit sample --checkpoint outputs/digits/checkpoints --classes 0-9 --output digits.png
  mm-dit sample --checkpoint outputs/pets/checkpoints --classes cat,dog --output pets.png
  mm-dit sample --checkpoint DiT-XL-2-256x256.pt --model examples/dit/imagenet256/model.json \\
      --classes 207,360,387 --num-per-class 4 --sampler ddpm --steps 250 --cfg-scale 4 --output samples.npz
  torchrun --nproc_per_node 2 -m mindspeed_mm_dit.cli.main -- sample --checkpoint outputs/digits/checkpoints \\
      --classes 0-9 --output digits/
  mm-dit sample --checkpoint outputs/digits/checkpoints --lora slanted.safetensors:0.8 --classes 0-9 --output s.png
  mm-dit sample --checkpoint outputs/moving_digits/checkpoints --prompt "a seven moves left" --output seven.mp4
  mm-dit sample --checkpoint outputs/high/checkpoints --low-noise-checkpoint outputs/low/checkpoints \\
      --cfg-scale 4 --low-noise-cfg-scale 3 --prompt "a seven moves left" --output seven.mp4

The ending of --output chooses what is written:
  .npz                arr_0, uint8 (N, H, W, C), and arr_1, the labels or prompts (N,)
  .png, .jpg, .jpeg   one picture, with a row per class or prompt
  .html               a page with label and seed below each image
  FOLDER/             single images, NUMBER_LABEL.png
Videos are written as .mp4, .gif, .npz or .png, a strip of frames. A sample depends on --seed, its number and the
settings, not on --batch-size or the number of ranks."""


DEFAULT_CFG_SCALE = 20
"""A larger --cfg-scale logs a note."""
NUM_PER_CLASS = 4
_OPTION = "sampler_option_"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the command."""
    add_flags(parser, ModelRequest)
    add_sampling_flags(parser)
    add = parser.add_argument
    add("--num-per-class", type=int, metavar="N", help=f"samples of each class (default {NUM_PER_CLASS})")
    add("--num-per-prompt", type=int, metavar="N", help="samples of each prompt (default 1)")
    add("--prompts", metavar="FILE", help="a text file with one prompt per line")
    add("--fps", type=float, help="frames per second of a video (default 16, as in Wan)")
    add(
        "--output",
        required=True,
        metavar="PATH",
        help=".npz for arrays, .png, .jpg or .jpeg for a picture, .html for a page, FOLDER/ for single images; "
        ".mp4 or .gif for videos",
    )


def add_sampling_flags(parser: argparse.ArgumentParser, *names: str, cfg_scale: float = CFG_SCALE) -> None:
    """Declare the flags of a SampleRequest, or those with ``names``, and one for each option of a sampler.

    A sampler without the option refuses it by name. Raises ConfigError if an option of a plugin is a flag already.
    """
    samplers = "; ".join(f"of {model_id}: {_first_is_default(kind.samplers)}" for model_id, kind in OBJECTIVES.items())
    add_flags(parser, SampleRequest, *names, cfg_scale=cfg_scale, samplers=samplers)
    group = parser.add_argument_group("options of some samplers")
    for field, kind, sampler_names in _options():
        default = f"{field.default:g}" if isinstance(field.default, float) else field.default
        help = f"{', '.join(sampler_names)}: {field.metadata.get('help', field.name)} (default {default})".replace(
            "%", "%%"
        )
        metavar = field.name.rpartition("_")[2].upper()
        try:
            group.add_argument(
                flag_of(field.name),
                dest=_OPTION + field.name,
                default=argparse.SUPPRESS,
                type=_type(kind),
                metavar=metavar,
                help=help,
            )
        except argparse.ArgumentError:
            raise ConfigError(
                f"The sampler {sampler_names[0]!r} has an option {field.name!r}, but {flag_of(field.name)} is a flag "
                "of this command already. Give the field another name."
            ) from None


def _first_is_default(samplers: Iterable[str]) -> str:
    first, *others = samplers
    return ", ".join([f"{first} (default)", *others])


def _options() -> Iterable[tuple[dataclasses.Field, Any, list[str]]]:
    """Return each option of a sampler, its type, and the samplers that have it."""
    options: dict[str, tuple[dataclasses.Field, Any, list[str]]] = {}
    for objective in OBJECTIVES.values():
        for name, sampler in objective.samplers.items():
            kinds = get_type_hints(sampler.options)
            for field in dataclasses.fields(sampler.options):
                options.setdefault(field.name, (field, kinds[field.name], []))[2].append(name)
    return options.values()


def _type(kind: Any) -> Callable[[str], Any]:
    """Return the function that turns a flag's text into a value of ``kind``; the sampler checks the value."""
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    if float in kinds or int in kinds:
        return float if float in kinds else int
    words = {"true": True, "false": False} if bool in kinds else {}
    return lambda text: None if text == "None" else words.get(text.lower(), text)


def request_of(args: argparse.Namespace, **values: Any) -> SampleRequest:
    """Return the request of the flags; ``values``: settings that are not one flag."""
    options = {name.removeprefix(_OPTION): value for name, value in vars(args).items() if name.startswith(_OPTION)}
    weaker = None
    if args.guidance_checkpoint is not None:
        from mindspeed_mm_dit.sampling.load import WEAKER, LazyModel, describe

        source = ModelRequest(args.guidance_checkpoint, weights=args.weights)
        weaker = LazyModel(describe(source, WEAKER), bf16=args.bf16, torch_compile=args.torch_compile)
    return SampleRequest.from_flags(args, options=options, weaker=weaker, **values)


def run(args: argparse.Namespace) -> int:
    """Describe the checkpoint, plan the samples, load the model, generate the samples and write them."""
    end_with_launcher(os.environ)
    with collective_error():
        check_launched(os.environ, args.ai_framework)
        activate(args.ai_framework)
        from mindspeed_mm_dit.framework import runtime
        from mindspeed_mm_dit.sampling.generate import generate_on_ranks, plan_samples
        from mindspeed_mm_dit.sampling.load import Experts, describe, load_model

        described = describe(ModelRequest.from_flags(args))
        output = Output(args.output, FPS if args.fps is None else args.fps)
        plan = plan_samples(_request(args, described.config.predictor.conditions), described, output=output.path)
        config, request, conditions = plan
        titles = conditions.titles(described.classes)
        if args.fps is not None and len(config.sample_size) == 2:
            raise ConfigError(f"--fps = {args.fps} is for videos, but this model generates images. Leave it out.")
        output.check(titles, config.sample_size)
        if request.guidance > DEFAULT_CFG_SCALE:
            echo(f"note: --cfg-scale {request.guidance:g} oversaturates samples; 1 to 10 are usual", file=sys.stderr)
    ranks = runtime.world_size()
    if ranks > 1:
        runtime.initialize(None, 1, ranks)
    try:
        model = load_model(described, bf16=args.bf16, torch_compile=args.torch_compile)
    except (UserError, OSError):
        if described.path.exists() or ranks > 1:
            raise
        return run(args)  # the run has deleted this checkpoint meanwhile: use the newest one
    started, path = time.perf_counter(), Path(os.path.realpath(args.output))
    parts = path.with_name(f".{path.name}.parts")
    images = generate_on_ranks(parts, model, plan, Experts(described) if described.low else None)
    seconds = time.perf_counter() - started
    if ranks > 1:
        runtime.shutdown()
    if images is None:  # only the first rank has them
        return 0
    samples = GeneratedSamples(images, tuple(titles), conditions.labels, request.seed)
    written = output.save(samples, _in_words(args, request, described))
    size, noun = " x ".join(map(str, config.sample_size)), "image" if images.ndim == 4 else "video"
    noun += "s" * (len(images) != 1)
    words = f", on {ranks} rank(s)" if ranks > 1 else ""
    words += "; the size is that of model.json (--size changes it)" if args.size is None else ""
    rate = f"{len(samples) / seconds:.2f} {noun.rstrip('s')}s/s"
    echo(f"{written}: {len(samples)} {noun} of {size} in {seconds:.1f} s, {rate}{words}")
    return 0


def _request(args: argparse.Namespace, conditions: Conditions) -> SampleRequest:
    """Return the request of the flags, with the prompts of a file and the number of samples for ``conditions``."""
    from mindspeed_mm_dit.sampling.conditions import check_takes, read_prompts

    for name, item in (("num_per_class", "label"), ("num_per_prompt", "caption"), ("prompts", "caption")):
        if getattr(args, name) is not None:
            check_takes(item, conditions, flag_of(name), getattr(args, name))
    prompts = [*(args.prompt or []), *([] if args.prompts is None else read_prompts("--prompts", args.prompts))]
    by_prompt = "caption" in conditions.items
    num = args.num_per_prompt if by_prompt else args.num_per_class
    if num is None:
        num = NUM_PER_CLASS if conditions.label is not None and not by_prompt else 1
    return request_of(args, num=num, prompts=prompts or None)


def _in_words(args: argparse.Namespace, request: SampleRequest, described: CheckpointDescription) -> dict[str, str]:
    """Return the settings that determine the samples, in words."""
    which = "EMA" if args.weights == "ema" else "weights being trained"
    words = {"checkpoint": f"{without_folders(args.checkpoint)} ({which})"}
    if args.lora:
        words["adapters"] = ", ".join(map(without_folders, args.lora))
    if described.low is not None:
        low = without_folders(args.low_noise_checkpoint or str(described.low.path))
        words["low noise"] = f"{low}, below {described.boundary:g}, guidance {request.low_noise_scale:g}"
    if args.guidance_checkpoint:
        words["guided by"] = without_folders(args.guidance_checkpoint)
    words["sampler"] = f"{request.sampler}, {request.steps} steps"
    words["guidance"] = f"{request.guidance:g} on channels: {request.channels}, interval {args.cfg_interval}"
    if request.rescale:
        words["guidance"] += f", rescaled by {request.rescale}"
    if args.guidance is not None:
        words["guidance input"] = f"{args.guidance:g}"
    words["precision"] = "bfloat16" if args.bf16 else "float32"
    return words
