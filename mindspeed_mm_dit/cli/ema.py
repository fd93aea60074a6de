"""``mm-dit ema``."""

from __future__ import annotations

import argparse

from mindspeed_mm_dit.checkpoint import power_ema
from mindspeed_mm_dit.checkpoint.averaging import make
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.terminal import echo, progress

DESCRIPTION = """\
Make an EMA (moving average of the weights) of a width that the run did not keep: post-hoc EMA, Karras et al. 2024. So
you can try many widths after one run.

  bash examples/dit/pretrain.sh --power-ema-stds 0.05 0.1 --save-retain-interval 100
  mm-dit ema --checkpoint outputs/digits/checkpoints --std 0.15 --output ema_0.15.safetensors
  mm-dit sample --checkpoint ema_0.15.safetensors --model examples/dit/model.json ...

The run keeps EMAs of two widths in every checkpoint; this command combines them into an EMA of any width. More
checkpoints give a closer fit, and the command prints the error of the fit. A width is the standard deviation of the
averaged steps as a fraction of the run: 0.05 looks back over about 10 % of the run, 0.1 over 20 %."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the command."""
    parser.add_argument(
        "--checkpoint",
        required=True,
        metavar="FOLDER",
        help="checkpoints of a run with --power-ema-stds; or one of them, to make the EMA at its iteration",
    )
    parser.add_argument("--std", required=True, type=float, metavar="S", help="width of the EMA, 0.001 to 0.288")
    parser.add_argument("--output", required=True, metavar="TARGET", help="file to write, or folder with --to")
    parser.add_argument("--to", metavar="FORMAT", help="format, as in mm-dit convert; default: by the ending of TARGET")
    parser.add_argument("--overwrite", action="store_true", help="replace TARGET if it is a checkpoint")


def run(args: argparse.Namespace) -> int:
    """Write the EMA, and print how close it is."""
    try:
        power_ema.exponent(args.std)
    except ValueError as error:
        raise ConfigError(f"--std = {args.std:g}", str(error)) from None

    result = make(
        args.checkpoint,
        args.std,
        args.output,
        args.to,
        args.overwrite,
        progress=lambda checkpoints: progress("averaging", checkpoints, total=len(checkpoints), unit="checkpoint"),
    )
    for note in result.notes:
        echo(f"note: {note}")
    steps = sorted({average.profile.step for average in result.saved})
    echo(
        f"width {args.std:g} at iteration {result.requested.step}, of {len(result.saved)} averages at iterations "
        f"{', '.join(map(str, steps[:3]))}{f' ... {steps[-1]}' if len(steps) > 3 else ''}; "
        f"EMA profile fit error: {result.error:.2%}"
    )
    if result.error > 0.05:
        echo("note: more checkpoints give a closer fit; --save-retain-interval N keeps those of every N-th iteration")
    echo(f"{args.output}: {result.num_tensors} tensors, {result.num_bytes / 1e6:.1f} MB")
    return 0
