"""``mm-dit convert``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

from mindspeed_mm_dit.checkpoint.convert import convert
from mindspeed_mm_dit.checkpoint.convert_experts import convert_experts
from mindspeed_mm_dit.checkpoint.targets import Summary
from mindspeed_mm_dit.configs.limits import short_repr
from mindspeed_mm_dit.configs.strict import read_json
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.terminal import echo

DESCRIPTION = """\
Write a checkpoint in another format, bit for bit: to move a run between PyTorch and MindSpore, to convert published
weights, or to use yours in other programs.

  mm-dit convert outputs/run/checkpoints NEW_FOLDER --to mindspore   continue a PyTorch run under MindSpore
  mm-dit convert outputs/run/checkpoints/iter_0001000 NEW_FOLDER --to pytorch     and back
  mm-dit convert DiT-XL-2-256x256.pt DiT-XL-2 --to diffusers
  mm-dit convert DiT-XL-2-256x256.pt DiT-XL-2-256 --to pipeline --model examples/dit/imagenet256/model.json
  mm-dit convert outputs/run/checkpoints model.safetensors --weights ema
  mm-dit convert sd-vae-ft-ema sd-vae.ckpt
  mm-dit convert outputs/lora/checkpoints FOLDER --to diffusers                      adapters (LoRA) for other programs
  mm-dit convert outputs/high/checkpoints FOLDER --low-noise-checkpoint outputs/low/checkpoints     two experts
  mm-dit convert Wan2.1-T2V-1.3B-Diffusers merged.safetensors --merge-lora lora.safetensors:0.8

The ending of TARGET chooses a file format: pt (facebookresearch/DiT's), safetensors, ckpt (MindSpore's). --to chooses a
folder format, or other names in a .safetensors:
  pytorch, mindspore   a checkpoint that --load takes, optimizer state included
  diffusers            the network alone
  original             one file under the names of the network's authors, as ComfyUI takes it
  pipeline             for from_pretrained of diffusers' pipeline: network, autoencoder, text encoders, scheduler
Adapters go to diffusers and peft (folders), kohya and native (files; ComfyUI and musubi-tuner read both).
Only the checkpoint folders of PyTorch need PyTorch; nothing needs MindSpore."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the command."""
    parser.add_argument("source", metavar="SOURCE", help="file, checkpoint folder, or folder of checkpoints (newest)")
    parser.add_argument("target", metavar="TARGET", help="file or folder to write")
    parser.add_argument("--to", metavar="FORMAT", help="one of the formats above")
    parser.add_argument(
        "--weights",
        choices=("ema", "model"),
        help="write only these weights (default: all that TARGET can hold; if that is one set, the EMA)",
    )
    parser.add_argument(
        "--model",
        metavar="JSON",
        help="model.json, or diffusers' config.json of a VAE: what cannot be read from the tensors",
    )
    parser.add_argument(
        "--merge-lora",
        action="append",
        default=[],
        metavar="FILE[:S]",
        help="merge adapters (LoRA) into the weights with strength S; may be given several times",
    )
    parser.add_argument(
        "--low-noise-checkpoint",
        metavar="PATH",
        help="the second expert of Wan 2.2, if SOURCE is the one of high noise: TARGET is a diffusers folder of both",
    )
    parser.add_argument(
        "--boundary",
        type=float,
        metavar="LEVEL",
        help="noise level at which the experts switch (default: as trained)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace TARGET if it is a checkpoint")


def run(args: argparse.Namespace) -> int:
    """Convert, and print what was done."""
    started = time.perf_counter()
    log = lambda line: echo(line, file=sys.stderr)  # noqa: E731
    if args.low_noise_checkpoint is not None:
        summary = _convert_both(args, log)
    else:
        description = read_json(args.model, "--model") if args.model else None
        summary = convert(
            args.source, args.target, args.to, args.weights, description, args.overwrite, log, args.merge_lora
        )
    for note in summary.notes:
        echo(f"note: {note}")
    source, target = f"{summary.source} ({summary.source_format})", f"{summary.target} ({summary.target_format})"
    echo(
        f"{source} -> {target}: {', '.join(summary.trees)}; {summary.num_tensors} tensors, "
        f"{summary.num_bytes / 1e6:.1f} MB in {time.perf_counter() - started:.1f} s"
    )
    return 0


def _convert_both(args: argparse.Namespace, log: Callable[[str], object]) -> Summary:
    """Write both experts of Wan 2.2 as one folder, after checking that they belong together."""
    from mindspeed_mm_dit.sampling.load import describe
    from mindspeed_mm_dit.sampling.request import ModelRequest

    for flag, value in (("--merge-lora", args.merge_lora), ("--to", args.to not in (None, "diffusers") and args.to)):
        if value:
            cure = "drop it, or convert the experts one by one"
            raise ConfigError(f"{flag} = {short_repr(value)}", "does not go with --low-noise-checkpoint", cure)
    described = describe(
        ModelRequest(
            args.source, model=args.model, low_noise_checkpoint=args.low_noise_checkpoint, boundary=args.boundary
        )
    )
    return convert_experts(
        args.source, args.low_noise_checkpoint, args.target, described.boundary, args.weights, args.overwrite, log
    )
