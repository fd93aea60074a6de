"""``mm-dit compare``."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.terminal import say

if TYPE_CHECKING:
    from mindspeed_mm_dit.configs.model import ModelConfig
    from mindspeed_mm_dit.wings.lab.compare import Sides

DESCRIPTION = """\
Run a model on PyTorch and on MindSpore, with the same weights and random numbers, and report every difference.

  mm-dit compare --model examples/dit/model.json
  mm-dit compare --model model.json --checkpoint DiT.pt --steps 0 --mindspore-python ~/ms/bin/python

Compares the forward pass layer by layer, every parameter's gradient, the losses of the first training steps (with the
train.args beside model.json), and samples. Measures images/s. Writes one HTML page, and the same as JSON. Each
framework runs in a process of its own, and in an interpreter of its own if needed. The exit code is 1 if a check
fails."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the command."""
    parser.add_argument("--model", required=True, metavar="JSON", help="model.json")
    parser.add_argument(
        "--checkpoint", metavar="PATH", help="weights, as for 'mm-dit sample' (default: random, from --seed)"
    )
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="training steps; 0: none (default 20)")
    parser.add_argument("--data", metavar="JSON", help="images to train on (default: data.json beside --model)")
    parser.add_argument("--train-args", metavar="FILE", help="training flags (default: train.args beside --model)")
    parser.add_argument("--batch-size", type=int, metavar="N", help="training batch (default: from train.args)")
    parser.add_argument(
        "--sample-steps",
        type=int,
        default=20,
        metavar="N",
        help="steps of the objective's quick sampler; 0: no samples (default 20)",
    )
    parser.add_argument("--seed", type=int, default=1234, help="seed of weights and random numbers (default 1234)")
    parser.add_argument("--output", default="report.html", metavar="HTML", help="the report (default report.html)")
    parser.add_argument("--pytorch-python", metavar="PY", help="interpreter with PyTorch (default: this one, .venv)")
    parser.add_argument(
        "--mindspore-python", metavar="PY", help="interpreter with MindSpore (default: this one, .venv-mindspore)"
    )


def run(args: argparse.Namespace) -> int:
    """Compare PyTorch and MindSpore."""
    from mindspeed_mm_dit.wings.lab.compare import Side
    from mindspeed_mm_dit.wings.lab.processes import find_python

    check_arguments(args)
    given = {"pytorch": args.pytorch_python, "mindspore": args.mindspore_python}
    first, second = (Side(name, find_python(name, python), name) for name, python in given.items())
    return run_sides(args, (first, second))


def run_sides(args: argparse.Namespace, sides: Sides) -> int:
    """Compare any two sides; the first is the reference. Write the report, print it, and return 0 or 1."""
    from mindspeed_mm_dit.wings.lab.compare import compare_sides

    folder = Path(tempfile.mkdtemp(prefix="mm-dit-compare-"))
    try:
        comparison = compare_sides(
            sides, folder, model=args.model, checkpoint=args.checkpoint, seed=args.seed, steps=args.steps,
            data=_data(args), train_args=_train_args(args), batch_size=args.batch_size, sample_steps=args.sample_steps,
        )  # fmt: skip
    except KeyboardInterrupt:
        shutil.rmtree(folder)
        raise
    comparison.save(args.output)
    say(str(comparison))
    say(f"report: {args.output}")
    shutil.rmtree(folder)  # (kept if a side fails, for its log)
    return 0 if comparison.good else 1


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse flags that cannot work, before time is spent."""
    from mindspeed_mm_dit.checkpoint.store import find_checkpoint
    from mindspeed_mm_dit.configs.data import load_data_config
    from mindspeed_mm_dit.configs.limits import LARGEST, check_between
    from mindspeed_mm_dit.configs.model import load_model_config
    from mindspeed_mm_dit.configs.outputs import check_output_file
    from mindspeed_mm_dit.framework.host_memory import host_memory_bytes
    from mindspeed_mm_dit.planning.fit import Place, check_model_fits

    model = load_model_config(args.model)
    model.require_labelled_images(f"--model = {args.model}")
    check_model_fits(model, Place("this machine", host_memory_bytes()))
    check_between("--seed", args.seed, 0, LARGEST)
    if args.steps < 0 or args.sample_steps < 0:
        raise ConfigError(f"--steps = {args.steps}, --sample-steps = {args.sample_steps}", "must not be negative")
    if args.sample_steps:
        check_sample_steps(args.sample_steps, model)
    if args.batch_size is not None and args.batch_size < 1:
        raise ConfigError(f"--batch-size = {args.batch_size}", "must be at least 1")
    if args.train_args is not None and not Path(args.train_args).is_file():
        raise ConfigError(f"--train-args = {args.train_args}", "is not there", "correct it, or leave it out")
    if args.steps:
        if not _data(args).is_file():
            raise ConfigError(f"--data = {_data(args)}", "is not there", "name a data.json, or pass --steps 0")
        load_data_config(_data(args), "--data")
    if args.checkpoint:
        find_checkpoint(args.checkpoint)
    if Path(args.output).suffix != ".html":
        raise ConfigError(f"--output = {args.output}", "is not a .html")
    check_output_file("--output", args.output)


def check_sample_steps(steps: int, model: ModelConfig) -> None:
    """Refuse a number of steps that the sampler of the comparison cannot take."""
    from mindspeed_mm_dit.objectives.registry import find_sampler, objective_of

    try:
        sampler = find_sampler(model.diffusion, objective_of(model.diffusion).quick_sampler)
        sampler.check(model.diffusion, steps, sampler.options())
    except ConfigError as error:
        cure = f"{error.cure.partition(',')[0]}, or 0 for no samples"
        raise ConfigError(f"--sample-steps = {steps}", error.reason, cure) from None


def _data(args: argparse.Namespace) -> Path:
    return Path(args.data) if args.data else Path(args.model).with_name("data.json")


def _train_args(args: argparse.Namespace) -> Path:
    return Path(args.train_args) if args.train_args else Path(args.model).with_name("train.args")
