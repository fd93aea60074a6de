"""``mm-dit compare``."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from mindspeed_mm_dit.checkpoint.store import find_checkpoint
from mindspeed_mm_dit.configs.data import load_data_config
from mindspeed_mm_dit.configs.limits import MAX_INT64, check_between
from mindspeed_mm_dit.configs.model import ModelConfig, load_model_config
from mindspeed_mm_dit.configs.run import check_output_file
from mindspeed_mm_dit.configs.strict import read_json
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.framework.contract import host_memory_bytes
from mindspeed_mm_dit.objectives.registry import find_sampler, objective_of
from mindspeed_mm_dit.planning import MemoryLimit, check_model_fits
from mindspeed_mm_dit.terminal import echo
from mindspeed_mm_dit.tools.verify.against import compare_against
from mindspeed_mm_dit.tools.verify.compare import Comparison, Side, Sides, compare_sides
from mindspeed_mm_dit.tools.verify.compare_traces import compare_traces
from mindspeed_mm_dit.tools.verify.processes import find_python

DESCRIPTION = """\
Where do two programs or two machines first differ? Three kinds of comparison:

  mm-dit compare --model examples/dit/model.json             a model on PyTorch and on MindSpore
  mm-dit compare --against diffusers:Wan2.1-T2V-1.3B         our network and that of diffusers, with weights of a folder
  mm-dit compare --against diffusers:WanTransformer3DModel   the same for a small network with random weights
  mm-dit compare gpu.trace npu.trace                     first steps of any training loop, on two machines

The last two measure how far two right programs may differ: they perturb every number by its rounding. They compare
outputs, gradients and the loss, and name the first module that is wrong. Step traces are recorded by two lines in the
loop, "with dit.record_trace(model, optimizer, 'gpu.trace') as w" and "w.step(loss)" (docs/prove.md).

With --model, both frameworks get the same weights and random numbers.
Compares the forward pass layer by layer, every parameter's gradient, the losses of the first training steps (with the
train.args next to model.json), and samples. Measures images/s. Writes one HTML page, and the same as JSON. Each
framework runs in a separate process, and with a separate interpreter if needed. The exit code is 1 if a check
fails."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the command."""
    add = parser.add_argument
    add("traces", nargs="*", metavar="TRACE", help="step traces of two machines; the first is the reference")
    words = "of traces: an object, parameter or module in the second -> its name in the first, * for any part"
    add("--names", metavar="JSON", help=words)
    add("--against", metavar="PROGRAM", help="diffusers:FOLDER or diffusers:CLASS")
    add("--model", metavar="JSON", help="model.json")
    add("--checkpoint", metavar="PATH", help="weights, as for 'mm-dit sample' (default: random, from --seed)")
    add("--steps", type=int, default=20, metavar="N", help="training steps; 0: none (default 20)")
    add("--data", metavar="JSON", help="images to train on (default: data.json next to --model)")
    add("--train-args", metavar="FILE", help="training flags (default: train.args next to --model)")
    add("--batch-size", type=int, metavar="N", help="training batch (default: from train.args)")
    words = "steps of the objective's quick sampler; 0: no samples (default 20)"
    add("--sample-steps", type=int, default=20, metavar="N", help=words)
    add("--seed", type=int, default=1234, help="seed of weights and random numbers (default 1234)")
    add("--output", default="report.html", metavar="HTML", help="the report (default report.html)")
    add("--pytorch-python", metavar="PY", help="interpreter with PyTorch (default: this one, .venv)")
    add("--mindspore-python", metavar="PY", help="interpreter with MindSpore (default: this one, .venv-mindspore)")


def run(args: argparse.Namespace) -> int:
    """Run the requested comparison; return 0 if both sides agree, 1 if not."""
    if sum(map(bool, (args.traces, args.against, args.model))) != 1 or len(args.traces) not in (0, 2):
        raise ConfigError("mm-dit compare takes two step traces, or --against, or --model. Name one of them.")
    if not args.model:
        _check_output(args.output)
        if args.against:
            return _report(args, compare_against(args.against, args.seed))
        first, second = args.traces
        return _report(args, compare_traces(first, second, read_json(args.names, "--names") if args.names else None))

    check_arguments(args)
    pythons = {"pytorch": args.pytorch_python, "mindspore": args.mindspore_python}
    first, second = (Side(name, find_python(name, python), name) for name, python in pythons.items())
    return run_sides(args, (first, second))


def _report(args: argparse.Namespace, comparison: Comparison) -> int:
    """Write the report and print it."""
    comparison.save(args.output)
    echo(str(comparison))
    echo(f"report: {args.output}")
    return 0 if comparison.good else 1


def run_sides(args: argparse.Namespace, sides: Sides) -> int:
    """Compare two sides; the first is the reference. Write the report, print it, and return 0 or 1."""
    folder = Path(tempfile.mkdtemp(prefix="mm-dit-compare-"))
    try:
        names = ("model", "checkpoint", "seed", "steps", "batch_size", "sample_steps")
        settings = {name: getattr(args, name) for name in names}
        comparison = compare_sides(sides, folder, data=_data(args), train_args=_train_args(args), **settings)
    except KeyboardInterrupt:
        shutil.rmtree(folder)
        raise
    shutil.rmtree(folder)  # (remains if a side fails, for its log)
    return _report(args, comparison)


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse flags that cannot work, before time is spent."""
    model = load_model_config(args.model)
    model.require_labelled_images(f"--model = {args.model}")
    check_model_fits(model, MemoryLimit("this machine", host_memory_bytes()))
    check_between("--seed", args.seed, 0, MAX_INT64)
    if args.steps < 0 or args.sample_steps < 0:
        raise ConfigError(f"--steps = {args.steps} and --sample-steps = {args.sample_steps} must not be negative.")
    if args.sample_steps:
        check_sample_steps(args.sample_steps, model)
    if args.batch_size is not None and args.batch_size < 1:
        raise ConfigError(f"--batch-size = {args.batch_size} must be at least 1.")
    if args.train_args is not None and not Path(args.train_args).is_file():
        raise ConfigError(f"--train-args = {args.train_args} does not exist. Correct it, or leave it out.")
    if args.steps:
        if not _data(args).is_file():
            raise ConfigError(f"--data = {_data(args)} does not exist. Name a data.json, or pass --steps 0.")
        load_data_config(_data(args), "--data")
    if args.checkpoint:
        find_checkpoint(args.checkpoint)
    _check_output(args.output)


def _check_output(path: str) -> None:
    if Path(path).suffix != ".html":
        raise ConfigError(f"--output = {path} must end in .html.")
    check_output_file("--output", path)


def check_sample_steps(steps: int, model: ModelConfig) -> None:
    """Refuse a number of steps that the sampler of the comparison cannot take."""
    try:
        sampler = find_sampler(model.diffusion, objective_of(model.diffusion).quick_sampler)
        sampler.check(model.diffusion, steps, sampler.options())
    except ConfigError as error:
        raise ConfigError(
            f"{str(error).replace('--steps', '--sample-steps', 1)} --sample-steps 0 draws no samples."
        ) from None


def _data(args: argparse.Namespace) -> Path:
    return Path(args.data) if args.data else Path(args.model).with_name("data.json")


def _train_args(args: argparse.Namespace) -> Path:
    return Path(args.train_args) if args.train_args else Path(args.model).with_name("train.args")
