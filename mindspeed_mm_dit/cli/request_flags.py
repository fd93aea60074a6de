"""The flags of a request for samples: classes, prompts, vectors, their number and size."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.files import UnusableFile
from mindspeed_mm_dit.configs.limits import whole_number
from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.configs.numpy_file import read_npy
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.framework import FRAMEWORKS
from mindspeed_mm_dit.sampling.request import (
    FLAGS,
    SampleRequest,
    check_amount,
    check_prompts_fit,
    check_request,
    labels_of,
    read_prompts,
    requested_images,
    split_classes,
    together,
)

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
