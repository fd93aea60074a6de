"""Compare the images/s that the loader makes (decode, flip, random numbers) with what a training step consumes.

    python benchmarks/loader.py --model examples/dit/model.json --data examples/dit/data.json [--batch 128]

The first epoch decodes the files; the second finds small data sets in memory. --workers threads prepare batches ahead,
as in training. The step is a real training step on this machine.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from argparse import Namespace
from typing import Any

from common import CLOCKS, Report, engine_flags, timed

from mindspeed_mm_dit.configs.data import load_data_config
from mindspeed_mm_dit.configs.model import load_model_config
from mindspeed_mm_dit.data.loader import load_batches
from mindspeed_mm_dit.data.order import micro_batches
from mindspeed_mm_dit.framework.pytorch import runtime
from mindspeed_mm_dit.models.composite import DiTModel
from mindspeed_mm_dit.models.data import open_data
from mindspeed_mm_dit.objectives.registry import draw_of
from mindspeed_mm_dit.training.pytorch.engine import Engine


def main() -> None:
    """Measure and write the result file."""
    args = parse()
    report = Report("loader", "Loader: decode, flip and draws")
    model, data = load_model_config(args.model), load_data_config(args.data)
    opened = open_data(model, data.dataset_param)
    samples = opened.samples(opened.rows, 0, data.dataloader_param.shuffle, draw_of(model.diffusion))
    batches = max(1, len(opened.rows) // args.batch)
    stream = load_batches(samples, micro_batches(0, args.batch, 0, 1), args.workers, 4)
    epochs = [timed(lambda: [next(stream) for _ in range(batches)], args.clock) for _ in range(args.rounds)]
    step = train_step(model, samples.batch(next(micro_batches(0, args.batch, 0, 1))), args)
    steps = [timed(step, args.clock) for _ in range(args.rounds + 1)][1:]
    report.raw({"epoch": epochs, "step": steps})
    rate = args.batch / statistics.median(steps)
    rows = [
        [name, f"{batches * args.batch / seconds:.0f}", f"{batches * args.batch / seconds / rate:.1f}"]
        for name, seconds in (("first epoch", epochs[0]), ("later epochs", statistics.median(epochs[1:])))
    ]
    report.say()
    report.table(["loader", "images/s", "x the step"], [*rows, ["train step", f"{rate:.0f}", ""]])
    report.say(f"{len(opened.rows)} images, batch {args.batch}, {args.workers} worker threads, {args.clock} seconds.")
    report.save()


def train_step(model: Any, batch: dict[str, Any], args: Namespace) -> Any:
    """Return a train step on one batch again and again."""
    runtime.initialize(None, args.batch, args.batch)
    flags = engine_flags(ema_decay=0.99, clip_grad=1.0)
    engine = Engine(DiTModel(model), flags, None)

    def forward_step(stream: Any, composite: Any) -> Any:
        return composite(**runtime.to_device(next(stream))), lambda losses: (losses.mean(), {"loss": losses.mean()})

    return lambda: engine.train_step(forward_step, itertools.repeat(batch), 1e-4)


def parse() -> Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="examples/dit/model.json")
    parser.add_argument("--data", default="examples/dit/data.json")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", default="wall", choices=list(CLOCKS), help="cpu: for a busy CPU, one thread")
    return parser.parse_args()


if __name__ == "__main__":
    main()
