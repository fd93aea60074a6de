"""``mm-dit sample``: its flags (what to draw, by which sampler, into which file), and the command."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import numpy as np

from mindspeed_mm_dit.checkpoint.lora import ScaledLora
from mindspeed_mm_dit.checkpoint.store import without_places
from mindspeed_mm_dit.configs.files import UnusableFile, read_npy
from mindspeed_mm_dit.configs.limits import short_repr, whole_number
from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.errors import ConfigError, flag_of
from mindspeed_mm_dit.framework import FRAMEWORKS, activate
from mindspeed_mm_dit.framework.exits import check_launched, collective_error, end_with_launcher
from mindspeed_mm_dit.models.words_encoder import note_of_words
from mindspeed_mm_dit.objectives.registry import OBJECTIVES
from mindspeed_mm_dit.sampling.outputs import FPS, Output
from mindspeed_mm_dit.sampling.request import (
    FLAGS,
    SampleRequest,
    check_amount,
    check_prompts_fit,
    check_request,
    labels_of,
    read_prompts,
    requested_images,
    resized,
    split_classes,
    together,
)
from mindspeed_mm_dit.terminal import echo

if TYPE_CHECKING:
    from mindspeed_mm_dit.sampling.generate import SampleSettings
    from mindspeed_mm_dit.sampling.load import Described, Experts


OPTIONS = "sampler_options"
"""Attribute of the parsed flags with the sampler options on the command line, by name."""


class _Option(NamedTuple):
    field: dataclasses.Field[Any]
    kind: Any
    samplers: list[str]
    """Samplers that have the option."""


class _StoreOption(argparse.Action):
    """Collects the options on the command line in one dictionary."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        """Store ``values``; the word None stands for None."""
        name = self.dest.removeprefix(f"{OPTIONS}.")
        options = {**getattr(namespace, OPTIONS), name: None if values == "None" else values}
        setattr(namespace, OPTIONS, options)


def add_sampler(parser: argparse.ArgumentParser) -> None:
    """Declare --sampler, with the samplers of every objective, including those of plugins."""
    known = "; ".join(f"of {model_id}: {_first_is_default(kind.samplers)}" for model_id, kind in OBJECTIVES.items())
    parser.add_argument("--sampler", metavar="NAME", help=_plain(known))


def add_sampler_options(parser: argparse.ArgumentParser) -> None:
    """Declare a flag for each field of the samplers' options. A sampler without the option refuses it by name.

    Raises ConfigError if an option of a plugin is already a flag of the command.
    """
    group = parser.add_argument_group("options of some samplers")
    parser.set_defaults(**{OPTIONS: {}})
    for name, option in _options().items():
        flag, words = flag_of(name), option.field.metadata.get("help", "")
        default = option.field.default
        default = f"{default:g}" if isinstance(default, float) else default
        try:
            group.add_argument(
                flag,
                action=_StoreOption,
                dest=f"{OPTIONS}.{name}",
                default=argparse.SUPPRESS,
                type=_type(option.kind),
                metavar=name.rpartition("_")[2].upper(),
                help=_plain(f"{', '.join(option.samplers)}: {words or name} (default {default})"),
            )
        except argparse.ArgumentError:
            raise ConfigError(
                f"option {name!r} of the sampler {option.samplers[0]!r}",
                f"{flag} is a flag of this command already",
                "give the field another name",
            ) from None


def _first_is_default(samplers: Iterable[str]) -> str:
    first, *others = samplers
    return ", ".join([f"{first} (default)", *others])


def _options() -> dict[str, _Option]:
    """Return the options of all samplers by name; an option that several samplers have is one flag."""
    options: dict[str, _Option] = {}
    for objective in OBJECTIVES.values():
        for name, sampler in objective.samplers.items():
            kinds = get_type_hints(sampler.options)
            for field in dataclasses.fields(sampler.options):
                options.setdefault(field.name, _Option(field, kinds[field.name], [])).samplers.append(name)
    return options


def _type(kind: Any) -> Callable[[str], Any]:
    """Return the function that turns a flag's text into a value of ``kind``; the sampler checks the value."""
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    known: tuple[type, ...] = (float, int)
    return next((candidate for candidate in known if candidate in kinds), _boolean if bool in kinds else str)


def _boolean(text: str) -> bool | str:
    return {"true": True, "false": False}.get(text.lower(), text)


def _plain(text: str) -> str:
    """Return ``text`` with percent signs escaped for argparse."""
    return text.replace("%", "%%")


_WORDS = {"label": "classes", "caption": "texts", "vector": "vectors", "image": "images"}


def add_framework(parser: argparse.ArgumentParser) -> None:
    """Declare the framework that computes."""
    parser.add_argument(
        "--ai-framework", choices=FRAMEWORKS, default=FRAMEWORKS[0], help=f"framework to use (default {FRAMEWORKS[0]})"
    )


def add_request(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of a request."""
    parser.add_argument(
        "--classes",
        metavar="LIST",
        help="labels, e.g. 0-9 or 1,5,7-9, or names that the checkpoint knows, e.g. cat,dog (default: the first 10); a "
        "name comes before a number or range, and one with a comma stands in double quotes: 'cat,\"salt, pepper\"'",
    )
    parser.add_argument("--num-per-class", type=int, metavar="N", help="samples of each class (default 4)")
    text = parser.add_argument_group("models with a text encoder")
    text.add_argument(
        "--prompt", action="append", metavar="TEXT", help="what a sample shows; may be given several times"
    )
    text.add_argument("--prompts", metavar="FILE", help="a text file with one prompt per line")
    text.add_argument("--num-per-prompt", type=int, metavar="N", help="samples of each prompt (default 1)")
    text.add_argument(
        "--negative-prompt", metavar="TEXT", help="text that guidance leads away from (default: the empty caption)"
    )
    parser.add_argument("--vectors", metavar="FILE", help="an .npy of vectors (N, P), for a model conditioned on them")
    add_size(parser)
    video = parser.add_argument_group("videos")
    video.add_argument("--image", metavar="FILE", help="the first frame, for a model that begins with an image")
    video.add_argument("--last-image", metavar="FILE", help="the last frame, for a model that takes one")
    video.add_argument("--frames", type=int, metavar="N", help="frames of a video (default: from model.json)")
    video.add_argument("--fps", type=float, help="frames per second of a video (default 16, as in Wan)")


def add_size(parser: argparse.ArgumentParser) -> None:
    """Declare the size of samples."""
    parser.add_argument("--size", metavar="HxW", help="height and width in pixels (default: from model.json)")


def parse_request(
    args: argparse.Namespace, config: ModelConfig, names: Sequence[str], captions: Sequence[str] = ()
) -> SampleRequest:
    """Return the request that the flags describe; ``names``, ``captions``: those stored with the checkpoint.

    Raises ConfigError for flags of conditions that the model does not take, and for wrong values.
    """
    items = config.predictor.conditions.items
    frames = config.predictor.conditions.frames
    _refuse_others(args, config, (*items, "image") if frames else items)
    values: dict[str, list[Any]] = {}
    each = 1
    if "label" in items:
        values["label"] = _classes(args, config, names)
        each = 4 if args.num_per_class is None else whole_number("--num-per-class", args.num_per_class, 1)
    if "caption" in items:
        values["caption"] = prompts_of(args.prompt or [], args.prompts, captions=captions)
        each = 1 if args.num_per_prompt is None else whole_number("--num-per-prompt", args.num_per_prompt, 1)
    if "vector" in items:
        values["vector"] = _vectors(args)
    if frames:
        values["image"] = requested_images(config, args.image, args.last_image)
    negative = {"caption": args.negative_prompt} if args.negative_prompt else {}
    check_prompts(config, values.get("caption", []), args.negative_prompt)
    request = SampleRequest(together(values), negative)
    check_request(request, config)
    flag = "--num-per-prompt" if "caption" in items else "--num-per-class"
    check_amount(f"{flag} = {each}", len(request) * each, config, Path(args.output))
    return request.each(each)


def _refuse_others(args: argparse.Namespace, config: ModelConfig, items: Sequence[str]) -> None:
    flags = [flag for item in items for flag in FLAGS.get(item, ())]
    for item, others in FLAGS.items():
        for flag in others:
            if item not in items and getattr(args, flag.strip("-").replace("-", "_")) is not None:
                inputs = " and ".join(_WORDS.get(name, name) for name in items)
                cure = f"use {flags[0]}" if flags else "leave it out"
                raise ConfigError(flag, f"this model is conditioned on {inputs}, not on {_WORDS[item]}", cure)
    if args.fps is not None and len(config.sample_size) == 2:
        raise ConfigError(f"--fps = {args.fps}", "this model generates images, not videos", "leave it out")


# --- classes -----------------------------------------------------------------------------------------------------


def _classes(args: argparse.Namespace, config: ModelConfig, names: Sequence[str]) -> list[int]:
    num_classes = config.predictor.conditions.label.num_classes  # type: ignore[union-attr]
    if args.classes is None:
        return list(range(min(10, num_classes)))
    return labels_of(split_classes(args.classes, names), names, num_classes)


# --- prompts and vectors -----------------------------------------------------------------------------------------


def prompts_of(
    inline: Sequence[str], file: str | None, flag: str = "--prompt", captions: Sequence[str] = ()
) -> list[str]:
    """Return the ``inline`` prompts and those of a text ``file``, one per line.

    Raises ConfigError if the file cannot be read, or if there are no prompts; the error then names ``flag``, and the
    first of ``captions`` as an example.
    """
    prompts = list(inline)
    if file is not None:
        prompts += read_prompts("--prompts", file)
    if not prompts:
        example = f"add {shlex.join(['--prompt', [*captions, 'a seven moves left'][0]])}"
        cure = example if flag == "--prompt" else "name a text file with one prompt per line"
        raise ConfigError(flag, "is missing: this model is conditioned on text", cure)
    return prompts


def check_prompts(config: ModelConfig, prompts: Sequence[str], negative: str | None, flag: str = "--prompt") -> None:
    """Raise ConfigError, naming ``flag``, for a prompt that a text encoder of the model cannot read completely."""
    if prompts:
        check_prompts_fit(config, prompts, flag)
        check_prompts_fit(config, [negative] if negative else [], "--negative-prompt")


def _vectors(args: argparse.Namespace) -> list[Any]:
    if args.vectors is None:
        raise ConfigError("--vectors", "is missing: this model is conditioned on vectors", "name an .npy of (N, P)")
    try:
        vectors = read_npy(args.vectors)
    except UnusableFile as problem:
        raise ConfigError(f"--vectors = {args.vectors}", str(problem), "name an .npy") from None
    if vectors.ndim != 2 or vectors.dtype.kind not in "iuf" or not np.isfinite(vectors).all():
        raise ConfigError(f"--vectors = {args.vectors}", f"has shape {vectors.shape}; must be finite vectors (N, P)")
    return list(vectors.astype(np.float32))


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


USUAL_SCALE = 20
"""A larger --cfg-scale logs a note."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the command."""
    add_model(parser, required=True)
    add_request(parser)
    add_sampler_flags(parser)
    add_experts(parser).add_argument(
        "--low-noise-cfg-scale",
        type=float,
        metavar="S",
        help="guidance of the low-noise expert (default: --cfg-scale)",
    )
    add_drawing(parser)
    parser.add_argument(
        "--output",
        required=True,
        metavar="PATH",
        help=".npz for arrays, .png, .jpg or .jpeg for a picture, .html for a page, FOLDER/ for single images; "
        ".mp4 or .gif for videos",
    )
    add_sampler_options(parser)


def add_model(parser: argparse.ArgumentParser, required: bool) -> None:
    """Declare the flags that name the model."""
    parser.add_argument(
        "--checkpoint",
        required=required,
        metavar="PATH",
        help="folder of checkpoints (the newest is used), published .pt, or .safetensors",
    )
    parser.add_argument(
        "--model",
        metavar="JSON",
        help="model.json; not needed if the checkpoint contains it, as those of a run or mm-dit convert do",
    )
    parser.add_argument(
        "--lora",
        action="append",
        default=[],
        metavar="FILE[:S]",
        help="add adapters (LoRA) of a run or of another program with strength S; may be given several times",
    )
    parser.add_argument(
        "--weights",
        choices=("ema", "model"),
        default="ema",
        help="use the EMA of the weights (default), or the weights being trained",
    )


def add_drawing(parser: argparse.ArgumentParser) -> None:
    """Declare the seed, and the flags that change memory and speed."""
    parser.add_argument("--seed", type=int, default=0, help="seed of all noise (default 0)")
    parser.add_argument(
        "--batch-size", type=int, default=64, metavar="N", help="samples generated at once (default 64)"
    )
    parser.add_argument("--bf16", action="store_true", help="run the network's matrix products in bfloat16")
    parser.add_argument(
        "--torch-compile", action="store_true", help="compile each block: a minute at the start, then faster steps"
    )
    add_framework(parser)


def add_sampler_flags(parser: argparse.ArgumentParser, cfg_scale: float = 4.0) -> None:
    """Declare the sampler, its steps, and the guidance."""
    add_sampler(parser)
    parser.add_argument("--steps", type=int, help="steps of the sampler (default 250, for videos 50, for FLUX.1 28)")
    parser.add_argument(
        "--cfg-scale",
        type=float,
        help=f"classifier-free guidance: 1 is none, larger is closer to the class (default {cfg_scale:g}, or 1 for a "
        "network that takes --guidance)",
    )
    parser.set_defaults(usual_cfg_scale=cfg_scale)
    parser.add_argument(
        "--guidance",
        type=float,
        metavar="G",
        help="strength of guidance for a network that takes it as an input, such as FLUX.1-dev (default: "
        "predictor.guidance of its model.json)",
    )
    parser.add_argument(
        "--guidance-checkpoint",
        metavar="PATH",
        help="autoguidance: guide away from the conditional prediction of this weaker model (an earlier checkpoint, a "
        "smaller network) instead of the model's own unconditional one; scaled by --cfg-scale, on all channels by "
        "default",
    )
    parser.add_argument(
        "--cfg-channels",
        choices=("3", "all"),
        help="guide the first 3 latent channels, as the published DiT does (default), or all (default with prompts)",
    )
    parser.add_argument(
        "--cfg-rescale",
        choices=("token", "sample"),
        help="give the guided prediction the norm of the conditional one: at each 2 x 2 latent pixels, as Qwen-Image "
        "does, or of the whole sample where it is longer, as Z-Image can (default: neither)",
    )
    parser.add_argument(
        "--cfg-interval",
        default="0,1",
        metavar="LOW,HIGH",
        help="guide only at noise levels, t/T or 1 - t, between LOW and HIGH (default 0,1: everywhere)",
    )


def add_experts(parser: argparse.ArgumentParser) -> Any:
    """Declare the flags that name the low-noise expert; return their group."""
    experts = parser.add_argument_group("two experts (Wan 2.2)")
    experts.add_argument(
        "--low-noise-checkpoint",
        metavar="PATH",
        help="the low-noise expert; --checkpoint is the high-noise expert, or a diffusers folder of both",
    )
    experts.add_argument(
        "--boundary",
        type=float,
        metavar="LEVEL",
        help="noise level from which on the high-noise expert is used (default: where their training windows meet)",
    )
    experts.add_argument(
        "--low-noise-lora", action="append", default=[], metavar="FILE[:S]", help="adapters of the low-noise expert"
    )
    return experts


def run(args: argparse.Namespace) -> int:
    """Generate the samples and write them."""
    end_with_launcher(os.environ)
    with collective_error():
        check_launched(os.environ, args.ai_framework)
        activate(args.ai_framework)
        from mindspeed_mm_dit.sampling.load import describe

        described = describe(args.checkpoint, args.model)
        work = _Work.from_args(args, described._replace(config=resized(described.config, args.frames, args.size)))
    samples, seconds = _draw(args, work)
    if samples is None:  # only the first rank has them
        return 0
    written = work.output.save(samples, work.request.labels, work.titles, args.seed, _settings_in_words(args, work))
    ranks = f", on {work.ranks} rank(s)" if work.ranks > 1 else ""
    size = " x ".join(map(str, work.config.sample_size))
    noun = "images" if samples.ndim == 4 else "videos"
    rate = f"{len(samples) / seconds:.2f} {noun}/s"
    default = "; the size is that of model.json (--size changes it)" if args.size is None else ""
    echo(f"{written}: {len(samples)} {noun} of {size} in {seconds:.1f} s, {rate}{ranks}{default}")
    return 0


@dataclass(frozen=True)
class _Work:
    """A request for samples, checked, with its settings and its output."""

    config: ModelConfig
    settings: SampleSettings
    request: SampleRequest
    titles: Sequence[str]
    """What each sample should show."""
    output: Output
    ranks: int
    adapters: Sequence[ScaledLora]

    @classmethod
    def from_args(cls, args: argparse.Namespace, described: Described) -> _Work:
        """Check all flags before weights are read."""
        from mindspeed_mm_dit.framework import runtime
        from mindspeed_mm_dit.sampling.load import load_adapters

        _, config, names, captions, words = described
        settings = settings_of(args, config, _parse_experts(args), args.low_noise_cfg_scale)
        if settings.guidance.scale > USUAL_SCALE:
            note = f"note: --cfg-scale {settings.guidance.scale:g} oversaturates samples; 1 to 10 are usual"
            echo(note, file=sys.stderr)
        output = Output(args.output, FPS if args.fps is None else args.fps)
        request = parse_request(args, config, names, captions)
        titles = request.titles(names)
        output.check(titles, config.sample_size)
        adapters = load_adapters(args.lora, config)
        if note := note_of_words(config, words, request.values.get("caption", ())):
            echo(note, file=sys.stderr)
        return cls(config, settings, request, titles, output, runtime.world_size(), adapters)


def load_asked(
    args: argparse.Namespace, adapters: Sequence[ScaledLora], checkpoint: Path | None = None
) -> tuple[Any, ModelConfig]:
    """Load the model that the flags name, or that in ``checkpoint``, with its ``adapters``."""
    from mindspeed_mm_dit.sampling.load import load_model

    return load_model(
        checkpoint or args.checkpoint,
        args.model,
        args.weights == "ema",
        adapters,
        bf16=args.bf16,
        torch_compile=args.torch_compile,
        guidance=args.guidance,
    )


def _draw(args: argparse.Namespace, work: _Work) -> tuple[np.ndarray | None, float]:
    """Generate the samples on all ranks; return them on the first rank (None on others), and the seconds it took."""
    from mindspeed_mm_dit.framework import runtime
    from mindspeed_mm_dit.sampling.generate import generate_spread

    if work.ranks > 1:
        runtime.initialize(None, 1, work.ranks)
    model, _ = load_asked(args, work.adapters)
    started = time.perf_counter()
    output = Path(os.path.realpath(args.output))
    parts = output.with_name(f".{output.name}.parts")
    samples = generate_spread(parts, (model, work.config), work.request, work.settings)
    seconds = time.perf_counter() - started
    if work.ranks > 1:
        runtime.shutdown()
    return samples, seconds


def _settings_in_words(args: argparse.Namespace, work: _Work) -> dict[str, str]:
    """Return the settings that determine the samples, in words."""
    guidance = work.settings.guidance
    which = "EMA" if args.weights == "ema" else "weights being trained"
    return {
        "checkpoint": f"{without_places(args.checkpoint)} ({which})",
        **({"adapters": ", ".join(map(without_places, args.lora))} if args.lora else {}),
        **(_low_noise(work.settings, work.settings.experts) if work.settings.experts else {}),
        **({"guided by": without_places(args.guidance_checkpoint)} if args.guidance_checkpoint else {}),
        "sampler": f"{work.settings.sampler}, {work.settings.steps} steps",
        "guidance": f"{guidance.scale:g} on channels: {guidance.channels}, interval {args.cfg_interval}"
        + (f", rescaled by {guidance.rescale}" if guidance.rescale else ""),
        **({"guidance input": f"{args.guidance:g}"} if args.guidance is not None else {}),
        "precision": "bfloat16" if args.bf16 else "float32",
    }


def _low_noise(settings: SampleSettings, experts: Experts) -> dict[str, str]:
    checkpoint = without_places(experts.low)
    return {"low noise": f"{checkpoint}, below {experts.boundary:g}, guidance {settings.low_noise_scale:g}"}


def settings_of(
    args: argparse.Namespace, config: ModelConfig, experts: Experts | None = None, low_scale: float | None = None
) -> SampleSettings:
    """Return the sampling settings of the flags for a model of ``config``; low_scale: guidance of the second expert.

    Raises ConfigError or PlatformError for flags that do not fit the model or this machine.
    """
    from mindspeed_mm_dit.objectives.guidance import GuidedChannels
    from mindspeed_mm_dit.sampling.generate import settings_for
    from mindspeed_mm_dit.sampling.load import weaker_network

    config.predictor.with_guidance(args.guidance)
    channels: GuidedChannels | None = args.cfg_channels
    weaker = None
    if args.guidance_checkpoint is not None:
        weaker = weaker_network(
            args.guidance_checkpoint, config, args.weights == "ema", bf16=args.bf16, torch_compile=args.torch_compile
        )
    return settings_for(
        config,
        sampler=args.sampler,
        steps=args.steps,
        scale=args.cfg_scale,
        usual_scale=args.usual_cfg_scale,
        channels=channels,
        interval=parse_interval(args.cfg_interval),
        rescale=args.cfg_rescale,
        seed=args.seed,
        batch_size=args.batch_size,
        options=getattr(args, OPTIONS),
        bf16=args.bf16,
        weaker=weaker,
        experts=experts,
        low_scale=low_scale,
    )


def _parse_experts(args: argparse.Namespace) -> Experts | None:
    """Return the two experts that the flags name; raises ConfigError for flags of experts if there is only one."""
    from mindspeed_mm_dit.sampling.load import ONE_NETWORK, experts, other_expert

    low = other_expert(args.checkpoint, args.low_noise_checkpoint)
    if low is None:
        for flag in ("boundary", "low_noise_lora"):
            if getattr(args, flag) not in (None, []):
                raise ConfigError(f"{flag_of(flag)} = {short_repr(getattr(args, flag))}", *ONE_NETWORK)
        return None
    if args.guidance_checkpoint is not None:
        raise ConfigError("--guidance-checkpoint", "does not go with --low-noise-checkpoint", "drop one of them")
    adapters = args.lora, args.low_noise_lora
    return experts(args.checkpoint, low, args.model, args.weights == "ema", adapters, args.boundary)


def parse_interval(text: str) -> tuple[float, float]:
    """Read "LOW,HIGH"."""
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--cfg-interval = {short_repr(text)}", "is not two numbers", "write 0.2,0.8") from None
    return low, high
