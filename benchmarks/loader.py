"""Compare the images/s that the loader makes (decode, flip, random numbers) with what a training step consumes.

    python benchmarks/loader.py --model examples/dit/model.json --data examples/dit/data.json [--batch 128]
    python benchmarks/loader.py --model examples/dit/imagenet256_jit/model.json --jpegs 3000 --precision bf16

--workers threads prepare batches ahead, as in training: in this process, or, as beside an accelerator, in others. The
step is a real training step: on one batch again and again, and on what either loader makes. --jpegs makes so many
photographs of 500 x 375 pixels for the run, in place of --data. Small data sets are decoded once and kept.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from common import Report, engine_flags, timed
from PIL import Image

from mindspeed_mm_dit.configs.data import load_data_config
from mindspeed_mm_dit.configs.fsdp2 import AUTOCAST, FLOAT32
from mindspeed_mm_dit.configs.model import load_model_config
from mindspeed_mm_dit.data.loader import load_batches, load_batches_in_process
from mindspeed_mm_dit.data.order import micro_batches
from mindspeed_mm_dit.framework.pytorch import runtime
from mindspeed_mm_dit.models.composite import DiTModel
from mindspeed_mm_dit.models.data import open_data
from mindspeed_mm_dit.objectives.registry import training_draw
from mindspeed_mm_dit.training.pytorch.engine import Engine

LOADERS = {"threads": load_batches, "processes of their own": load_batches_in_process}
Take = Callable[[Iterator[Any]], Any]


def main() -> None:
    """Measure and write the result file."""
    args = parse()
    report = Report("loader", "Loader: decode, flip and draws")
    model = load_model_config(args.model)
    with tempfile.TemporaryDirectory() as folder:
        data = load_data_config(
            jpegs(Path(folder), args.jpegs, model.predictor.input_size) if args.jpegs else args.data
        )
        opened = open_data(model, data.dataset_param)
        samples = opened.samples(opened.rows, 0, data.dataloader_param.shuffle, training_draw(model.diffusion))
        ahead = max(data.dataloader_param.prefetch_batches, args.workers)

        def rates(take: Take) -> dict[str, list[float]]:
            made = {
                name: load(samples, micro_batches(0, args.batch, 0, 1), args.workers, ahead)
                for name, load in LOADERS.items()
            }
            return {name: measured(batches, take, args) for name, batches in made.items()}

        loaders = rates(next)
        step = train_step(model, args)
        same = samples.batch(next(micro_batches(0, args.batch, 0, 1)))
        found = {f"loader alone, in {name}": rate for name, rate in loaders.items()}
        found["step alone, on one batch"] = measured(itertools.repeat(same), step, args)
        found |= {f"both, the loader in {name}": rate for name, rate in rates(step).items()}
    report.raw(found)
    report.echo()
    rows = [[name, f"{rate[0]:.0f}", f"{statistics.median(rate[1:]):.0f}"] for name, rate in found.items()]
    report.table(["images/s", "first round", "later ones"], rows)
    report.echo(f"{len(opened.rows)} images, batch {args.batch}, {args.workers} threads, {args.steps} batches a round.")
    report.save()


def measured(batches: Iterator[Any], take: Take, args: Namespace) -> list[float]:
    """Return the images a second of each round, after two batches that do not count."""
    take(batches), take(batches)

    def one_round() -> None:
        for _ in range(args.steps):
            take(batches)

    rates = [args.batch * args.steps / timed(one_round) for _ in range(args.rounds)]
    if not isinstance(batches, itertools.repeat):
        batches.close()  # type: ignore[attr-defined]
    return rates


def jpegs(folder: Path, count: int, size: int) -> str:
    """Make ``count`` photographs of clouds and grain in ``folder``, and return their data.json."""

    def draw(number: int) -> None:
        generator = np.random.default_rng(number)
        clouds = Image.fromarray(generator.integers(0, 256, (12, 16, 3), np.uint8)).resize((500, 375))
        grained = np.asarray(clouds) + generator.normal(0, 12, (375, 500, 3))
        Image.fromarray(grained.clip(0, 255).astype(np.uint8)).save(images / f"{number}.jpg", quality=90)

    images = folder / "images/cloud"
    images.mkdir(parents=True)
    with ThreadPoolExecutor() as pool:
        list(pool.map(draw, range(count)))
    param = {"dataset_type": "image_folder", "data_folder": str(images.parent), "image_size": size, "random_flip": True}
    (folder / "data.json").write_text(json.dumps({"dataset_param": param, "dataloader_param": {"shuffle": True}}))
    return str(folder / "data.json")


def train_step(model: Any, args: Namespace) -> Take:
    """Return a train step on the next of some batches."""
    runtime.initialize(None, args.batch, args.batch)
    flags = engine_flags(ema_decay=0.99, clip_grad=1.0, torch_compile=args.torch_compile)
    engine = Engine(DiTModel(model), flags, None, AUTOCAST if args.precision == "bf16" else FLOAT32)

    def forward_step(batches: Iterator[Any], composite: Any) -> Any:
        return composite(**runtime.to_device(next(batches))), lambda losses: (losses.mean(), {"loss": losses.mean()})

    return lambda batches: engine.train_step(forward_step, batches, 1e-4)


def parse() -> Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="examples/dit/model.json")
    parser.add_argument("--data", default="examples/dit/data.json")
    parser.add_argument("--jpegs", type=int, metavar="N", help="make so many photographs, in place of --data")
    for name, value in (("batch", 128), ("workers", 2), ("rounds", 3), ("steps", 14)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--torch-compile", action="store_true", help="compile the blocks")
    return parser.parse_args()


if __name__ == "__main__":
    main()
