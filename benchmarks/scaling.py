"""Measure one, two and four ranks: bytes of model, optimizer and EMA on each, and seconds per step.

    python benchmarks/scaling.py [--preset DiT-S/2] [--ranks 1 2 4] [--micro-batch 2] [--steps 4]

Ranks on one CPU share its cores, so images/s says nothing about scaling there; the bytes do. For GPUs, run it on a
machine with at least as many as the largest --ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from argparse import Namespace

from common import Report, engine_flags, timed

from mindspeed_mm_dit.configs.fsdp2 import FLOAT32

WORKER = "MM_DIT_BENCHMARK_WORKER"


def main() -> None:
    """Run every world size in processes of its own, and write the result file."""
    args = parse()
    if os.environ.get(WORKER):
        return worker(args)
    report = Report("scaling", f"Ranks and sharding, {args.preset}")
    found = {(ranks, kind): launch(ranks, kind) for ranks in args.ranks for kind in kinds(ranks)}
    whole = found[args.ranks[0], "replicated"]["state"]
    rows = []
    for (ranks, kind), result in found.items():
        report.echo(f"    {ranks} {kind}: " + " ".join(f"{seconds:.3f}" for seconds in result["seconds"]))
        median = statistics.median(result["seconds"])
        rows.append(
            [ranks, kind, f"{result['state'] / 1e6:.1f}", f"{result['state'] / whole:.3f}",
             f"{result['planned'] / 1e6:.1f}", f"{median:.3f}", f"{ranks * args.micro_batch / median:.2f}"]
        )  # fmt: skip
    report.echo()
    headings = ["ranks", "weights", "MB a rank", "of one rank's", "planned MB", "median s a step", "images/s"]
    report.table(headings, rows)
    report.echo(
        "MB: bytes of model, AdamW moments and moving average on rank 0, from its tensors; planned: mm-dit plan."
    )
    report.save()


def kinds(ranks: int) -> list[str]:
    """Return how the weights can be spread over ``ranks``."""
    return ["replicated", "sharded"] if ranks > 1 else ["replicated"]


def launch(ranks: int, kind: str) -> dict:
    """Run a world of ``ranks`` and return what its first rank found."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    done = subprocess.run(
        [*command, *sys.argv], env={**os.environ, WORKER: kind}, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


def worker(args: Namespace) -> None:
    """Take steps on this rank; print bytes and seconds on the first."""
    from torch.distributed.tensor import DTensor
    from train_throughput import batches, model_config

    from mindspeed_mm_dit.configs.fsdp2 import Fsdp2Config
    from mindspeed_mm_dit.framework.pytorch import runtime
    from mindspeed_mm_dit.models.autoencoder import NoAutoencoder
    from mindspeed_mm_dit.models.composite import DiTModel
    from mindspeed_mm_dit.planning import Placement, memory
    from mindspeed_mm_dit.training.pytorch.engine import Engine

    world = int(os.environ["WORLD_SIZE"])
    runtime.initialize(None, args.micro_batch, args.micro_batch * world)
    sharded = os.environ[WORKER] == "sharded"
    fsdp2 = Fsdp2Config(sharding_size="auto", sub_modules_to_wrap=("predictor.blocks.{*}",)) if sharded else None
    flags = engine_flags(ema_decay=0.99, clip_grad=1.0)
    args.size = 32
    config = model_config(args)
    engine = Engine(DiTModel(config, NoAutoencoder(config.ae)), flags, fsdp2)
    stream = batches(args, args.micro_batch)

    def forward_step(source, model):
        return model(**runtime.to_device(next(source))), lambda losses: (losses.mean(), {"loss": losses.mean()})

    seconds = [timed(lambda: engine.train_step(forward_step, stream, 1e-4)) for _ in range(args.steps + 1)][1:]
    state = engine.state()
    tensors = [*state["model"].values(), *state["ema"].values()]
    tensors += [x for moments in state["optimizer"]["state"].values() for x in moments.values()]
    held = sum((x.to_local() if isinstance(x, DTensor) else x).nbytes for x in tensors)
    plan = memory(config, Placement(world, world if sharded else 1, FLOAT32))
    if runtime.rank() == 0:
        print(json.dumps({"state": held, "planned": plan.weights + plan.optimizer + plan.ema, "seconds": seconds}))
    runtime.barrier()
    runtime.shutdown()


def parse() -> Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="DiT-S/2")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    return parser.parse_args()


if __name__ == "__main__":
    main()
