"""A step of a run of the standalone host, computed again: as it was, for draws are functions of the position."""

from __future__ import annotations

import math
from argparse import Namespace
from pathlib import Path

from mindspeed_mm_dit.checkpoint import torch_dcp
from mindspeed_mm_dit.checkpoint.store import read_facts
from mindspeed_mm_dit.data.order import micro_batches
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.hosts.steps import begin, join, script
from mindspeed_mm_dit.training.batches import train_valid_batches
from mindspeed_mm_dit.training.data_set import open_data_set
from mindspeed_mm_dit.training.lr import LearningRate
from mindspeed_mm_dit.training.pytorch.engine import Engine
from mindspeed_mm_dit.training.pytorch.probe import Probe
from mindspeed_mm_dit.training.replay import Sample
from mindspeed_mm_dit.training.start import Start, check_fits, print_rank_0, say_on_this_rank
from mindspeed_mm_dit.verify.replay import StepReport


def replay(args: Namespace, checkpoint: Path | None, iteration: int) -> bool:
    """Take the steps after ``checkpoint`` (None: the beginning) up to ``iteration``, or up to the first that is not
    finite; print what that one was like, and return whether it is finite.

    ``args``: the flags of the run; its batch is cut into as many ranks as there are now, with the same samples.
    """
    join(args)
    start = Start(checkpoint, int(checkpoint.name[5:]), read_facts(checkpoint)) if checkpoint else None
    if start is not None:
        check_fits(args, start, torch_dcp)
    engine = begin(args, start)
    report = _steps(args, engine, start, iteration)
    print_rank_0("\n".join(report.head()))
    for rank in range(runtime.world_size()):
        if rank == runtime.rank():
            own = [f"rank {rank}:"] if runtime.world_size() > 1 else []
            say_on_this_rank("\n".join([*own, *report.lines()]))
        runtime.barrier()
    runtime.shutdown()
    return report.is_finite


def _steps(args: Namespace, engine: Engine, start: Start | None, last: int) -> StepReport:
    """Take steps from ``start`` on, and report the last, or the first that is not finite."""
    done = start.iteration if start else 0
    args.consumed_train_samples = done * args.global_batch_size
    if start is not None:
        args.consumed_train_samples = start.facts.get("consumed_samples", args.consumed_train_samples)
    print_rank_0(f"from {start.path if start else 'the beginning'}: {last - done} step(s) to iteration {last}")
    batches, _ = train_valid_batches(args)
    probe, schedule = Probe(engine.predictor), LearningRate.of(args)
    while True:
        probe.begin()
        result = engine.train_step(script(probe.loss, probe.next), batches, schedule.at(done))
        loss, norm = runtime.read_later([result.loss, result.grad_norm]).wait()
        done += 1
        if done == last or not (math.isfinite(loss) and math.isfinite(norm)):
            samples = _samples(args, runtime.num_microbatches())
            stem = args.mm.model.parameters().stem
            return StepReport(done, loss, norm, probe.not_finite, samples, probe.largest, stem)
        args.consumed_train_samples += args.global_batch_size


def _samples(args: Namespace, count: int) -> list[list[Sample]]:
    """Return which samples the ``count`` micro-batches of this rank were in the step."""
    data, rank, ranks = open_data_set(args.mm, args.seed), runtime.data_rank(), runtime.data_world_size()
    positions = micro_batches(args.consumed_train_samples, args.micro_batch_size, rank, ranks)
    return [data.named(own) for _, own in zip(range(count), positions)]
