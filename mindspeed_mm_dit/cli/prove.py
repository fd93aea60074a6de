"""``mm-dit prove``."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from mindspeed_mm_dit.errors import ConfigError

DESCRIPTION = """\
Is my training step right, in every layout I am going to pay for?

  mm-dit prove digits
  mm-dit prove configs/mine --layouts 'FSDP2*' hybrid --output proof.html
  mm-dit prove configs/mine --checkpoint runs/mine/checkpoints --steps 5

Takes one optimizer step on one rank in float64, by your config folder and data, and then the same step in every layout
that this machine can run: losses, every gradient, their norm, every weight and its average after the step must be the
truth but for rounding, which is measured. Where a layout is wrong, says the first wrong module. The exit code is 1 if
one is, 2 for a mistake in the input."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the command."""
    parser.add_argument(
        "config", metavar="CONFIG", help="folder with model.json, data.json and train.args, or an embedded one"
    )
    parser.add_argument("--layouts", nargs="+", default=[], metavar="NAME", help="these alone; * stands for anything")
    parser.add_argument("--list", action="store_true", help="say which layouts there are, and end")
    parser.add_argument("--checkpoint", metavar="PATH", help="weights to begin with, of any format; default: drawn")
    parser.add_argument(
        "--full",
        action="store_true",
        help="the whole model and batch (default: a narrowed copy, 16 samples)",
    )
    parser.add_argument("--steps", type=int, default=1, metavar="N", help="steps to take (default 1)")
    parser.add_argument("--output", default="proof.html", metavar="HTML", help="the page; the JSON goes beside it")
    parser.add_argument("--mindspore-python", metavar="PY", help="interpreter with MindSpore (default: this one, "
                        ".venv-mindspore)")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Prove the layouts; 0 if all that are proved are right, 1 if one is wrong."""
    from mindspeed_mm_dit.verify.layouts import chosen

    layouts = chosen(args.layouts)
    if args.list:
        print("\n".join(map(str, layouts)))
        return 0
    check_arguments(args)
    from mindspeed_mm_dit.configs.embedded import config_folder
    from mindspeed_mm_dit.verify.processes import interpreters
    from mindspeed_mm_dit.verify.proof import open_config, prove
    from mindspeed_mm_dit.verify.proof_page import said, write_proof

    folder = Path(tempfile.mkdtemp(prefix="mm-dit-prove-"))
    try:
        config = open_config(config_folder(args.config), folder, args.checkpoint, args.full, args.steps)
        verdicts = prove(config, layouts, interpreters(args.mindspore_python), _say)
        write_proof(Path(args.output), config, verdicts)
    finally:
        shutil.rmtree(folder)
    print(said(verdicts))
    print(f"page: {args.output}, the same as JSON: {Path(args.output).with_suffix('.json')}")
    return 1 if any(verdict.word == "FAIL" for verdict in verdicts) else 0


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse what cannot work before time is spent."""
    from mindspeed_mm_dit.configs.embedded import config_folder
    from mindspeed_mm_dit.configs.outputs import check_output_file

    config_folder(args.config)
    if args.steps < 1:
        raise ConfigError(f"--steps = {args.steps}", "must be at least 1")
    if Path(args.output).suffix != ".html":
        raise ConfigError(f"--output = {args.output}", "is not a .html")
    check_output_file("--output", args.output)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
