"""``mm-dit sample`` of a model that is steered by texts."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_mm_dit.configs.limits import MOST_FRAMES, MOST_PIXELS, check_between, shown
from mindspeed_mm_dit.configs.outputs import check_output_file
from mindspeed_mm_dit.errors import ConfigError

if TYPE_CHECKING:
    from mindspeed_mm_dit.configs.model import ModelConfig
    from mindspeed_mm_dit.sampling.generate import SampleSettings

MOST_CLIPS = 10_000
FLAGS = ("--prompt", "--prompts", "--num-per-prompt", "--negative-prompt", "--frames", "--size", "--fps")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags that are for texts and clips."""
    group = parser.add_argument_group("text to video (models with a text encoder)")
    group.add_argument(
        "--prompt", action="append", metavar="TEXT", help="what a clip shows; may be given several times"
    )
    group.add_argument("--prompts", metavar="FILE", help="a text file with a prompt a line")
    group.add_argument("--num-per-prompt", type=int, metavar="N", help="clips of each prompt (default 1)")
    group.add_argument(
        "--negative-prompt",
        metavar="TEXT",
        help="what guidance leads away from (default: the empty caption)",
    )
    group.add_argument("--frames", type=int, metavar="N", help="frames of a clip (default: those of model.json)")
    group.add_argument("--size", metavar="HxW", help="height and width in pixels (default: those of model.json)")
    group.add_argument("--fps", type=float, help="frames a second of a video (default 16, Wan's)")


def given(args: argparse.Namespace) -> list[str]:
    """Return those of the flags that were given."""
    return [flag for flag in FLAGS if getattr(args, flag.strip("-").replace("-", "_")) is not None]


def sample_clips(args: argparse.Namespace, config: ModelConfig, settings: SampleSettings) -> int:
    """Draw and write; all that can be is checked first."""
    from tqdm import tqdm

    from mindspeed_mm_dit.framework import runtime
    from mindspeed_mm_dit.models.registry import open_tokenizer
    from mindspeed_mm_dit.models.text_encoder import check_captions
    from mindspeed_mm_dit.sampling.clips import FPS, MOST_FPS, check_clips_file, save_clips
    from mindspeed_mm_dit.sampling.generate import generate_clips
    from mindspeed_mm_dit.sampling.load import load_model

    if runtime.world_size() > 1:
        raise ConfigError(
            f"{runtime.world_size()} ranks", "clips are drawn by one", "start the command without torchrun"
        )
    for flag, value in (("--classes", args.classes), ("--num-per-class", args.num_per_class)):
        if value is not None:
            raise ConfigError(flag, "this model is steered by texts, not by classes", "use --prompt")
    each, fps = 1 if args.num_per_prompt is None else args.num_per_prompt, FPS if args.fps is None else args.fps
    check_between("--num-per-prompt", each, 1, MOST_CLIPS)
    prompts, negative = [prompt for prompt in _prompts(args, each) for _ in range(each)], args.negative_prompt or ""
    config, output = resized(config, args.frames, args.size), Path(args.output)
    check_between("--fps", fps, 0.1, MOST_FPS.get(output.suffix.lower(), 1000))
    frames, height, width = config.sample_size
    check_clips_file(output, len(prompts), (frames, height, width))
    check_output_file("--output", output)
    tokenizer = open_tokenizer(config.text_encoders[0])
    check_captions(tokenizer, prompts, "--prompt")
    check_captions(tokenizer, [negative] if negative else [], "--negative-prompt")
    model, _ = load_model(
        args.checkpoint, args.model, args.weights == "ema", bf16=args.bf16, torch_compile=args.torch_compile
    )
    started = time.perf_counter()
    with tqdm(
        total=settings.steps * len(prompts), desc="sampling", unit="clip-step", disable=not sys.stderr.isatty()
    ) as bar:
        clips = generate_clips(model, config, prompts, settings, bar.update, negative)
    seconds = time.perf_counter() - started
    paths = save_clips(output, clips, prompts, fps)
    shown_paths = str(paths[0]) if len(paths) == 1 else f"{paths[0]} ... {paths[-1].name}"
    print(f"{shown_paths}: {len(clips)} clip(s) of {frames} x {height} x {width} in {seconds:.1f} s")
    return 0


def _prompts(args: argparse.Namespace, each: int) -> list[str]:
    prompts = list(args.prompt or [])
    if args.prompts is not None:
        try:
            lines = Path(args.prompts).read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--prompts = {args.prompts}", f"cannot be read: {error}", "name a text file") from None
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            raise ConfigError(f"--prompts = {args.prompts}", "holds no prompt", "write a prompt a line")
        prompts += found
    if not prompts:
        raise ConfigError("--prompt", "is missing: this model is steered by texts", 'add --prompt "a seven moves left"')
    check_between("--prompt: clips", len(prompts) * each, 1, MOST_CLIPS)
    return prompts


def resized(config: ModelConfig, frames: int | None, size: str | None) -> ModelConfig:
    """Return ``config`` with latents of clips of other ``frames`` or ``size`` ("HxW"); no weight depends on them."""
    own_frames, own_height, own_width = config.sample_size
    height, width = (own_height, own_width) if size is None else _parse_size(size)
    frames = own_frames if frames is None else frames
    check_between("--frames", frames, 1, MOST_FRAMES)
    try:
        predictor = config.predictor.resized(config.ae.latent_shape((frames, height, width)))
    except ConfigError as error:
        flag = "--frames" if "frames" in error.what or size is None else "--size"
        raise ConfigError(f"{flag} = {frames if flag == '--frames' else size}", error.reason, error.cure) from None
    return dataclasses.replace(config, predictor=predictor)


def _parse_size(text: str) -> tuple[int, int]:
    height, _, width = text.partition("x")
    if not (height.isdecimal() and width.isdecimal()):
        raise ConfigError(f"--size = {shown(text)}", "is not HEIGHTxWIDTH", "write 480x832")
    for side in (height, width):
        check_between("--size", int(side), 1, MOST_PIXELS)
    return int(height), int(width)
