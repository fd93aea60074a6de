"""``mm-dit plot``."""

from __future__ import annotations

import argparse
from pathlib import Path

from mindspeed_mm_dit.configs.run import check_output_file
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.terminal import echo
from mindspeed_mm_dit.tools.visualize.curves import draw_loss, draw_losses, read_curve, read_validation

DESCRIPTION = """\
Draw the loss curves of one run or several in one picture: on training data, and on held-out data if there is any.
With one run, a second panel shows the held-out loss for each quarter of the noise level, from data to noise.

  mm-dit plot outputs/digits train.log ../DiT/results/000-DiT-XL-2/log.txt --output loss.png

A LOG is the folder of a run, a TensorBoard folder, or a text log: ours, MindSpeed-MM's or facebookresearch/DiT's."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the command."""
    parser.add_argument("logs", nargs="+", metavar="LOG", help="log file, or folder of a run or of TensorBoard")
    parser.add_argument("--output", default="loss.png", metavar="PNG", help="picture to write (default loss.png)")
    parser.add_argument(
        "--smooth",
        type=int,
        metavar="N",
        help="running mean over N log lines; 1: no smoothing (default: 1/40 of each curve)",
    )


def run(args: argparse.Namespace) -> int:
    """Read the logs, draw them, and print what was read."""
    if Path(args.output).suffix != ".png":
        raise ConfigError(f"--output = {args.output}", "is not a .png")
    if args.smooth is not None and args.smooth < 1:
        raise ConfigError(f"--smooth = {args.smooth}", "must be at least 1")

    check_output_file("--output", args.output)

    curves = [read_curve(log) for log in args.logs]
    validations = [read_validation(log) for log in args.logs]
    if len(curves) == 1:
        draw_loss(Path(args.output), curves[0], validations[0], args.smooth)
    else:
        draw_losses(Path(args.output), curves, validations, args.smooth)
    for curve in curves:
        echo(f"{curve.label}: {len(curve.steps)} losses, step {curve.steps[0]} to {curve.steps[-1]}, "
              f"last {curve.losses[-1]:.6g}")  # fmt: skip
    echo(args.output)
    return 0
