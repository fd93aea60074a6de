"""A step of a run of the standalone host, computed again: as it was, for draws are functions of the position."""

from __future__ import annotations

import math
from pathlib import Path

from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.hosts.steps import begin, join, script, starting, steps_after
from mindspeed_mm_dit.training.data_set import open_data_set
from mindspeed_mm_dit.training.pytorch.engine import Engine
from mindspeed_mm_dit.training.pytorch.probe import Probe
from mindspeed_mm_dit.training.replay import Sample
from mindspeed_mm_dit.training.start import Start, print_rank_0, say_on_this_rank
from mindspeed_mm_dit.verify.replay import StepReport


def replay(args: RunConfig, checkpoint: Path | None, iteration: int) -> bool:
    """Take the steps after ``checkpoint`` (None: the beginning) up to ``iteration``, or up to the first that is not
    finite; print what that one was like, and return whether it is finite.

    ``args``: the flags of the run; its batch is cut into as many ranks as there are now, with the same samples.
    """
    args = join(args)
    start = starting(args, checkpoint)
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


def _steps(args: RunConfig, engine: Engine, start: Start | None, last: int) -> StepReport:
    """Take steps from ``start`` on, and report the last, or the first that is not finite."""
    done = start.iteration if start else 0
    print_rank_0(f"from {start.path if start else 'the beginning'}: {last - done} step(s) to iteration {last}")
    probe = Probe(engine.predictor)
    probe.begin()
    for step in steps_after(args, engine, start, script(probe.loss, probe.next)):
        if step.iteration == last or not (math.isfinite(step.loss) and math.isfinite(step.grad_norm)):
            samples = _samples(args, step.began_at, runtime.num_microbatches())
            return StepReport(*step[:3], probe.not_finite, samples, probe.largest, args.mm.model.parameters().stem)
        probe.begin()
    raise AssertionError("a run has no end of steps")


def _samples(args: RunConfig, began_at: int, count: int) -> list[list[Sample]]:
    """Return which samples the ``count`` micro-batches of this rank are in the step after ``began_at`` samples."""
    data, rank, ranks = open_data_set(args.mm, args.seed), runtime.data_rank(), runtime.data_world_size()
    positions = data.micro_batches(began_at, args.micro_batch_size, rank, ranks, count)
    return [data.named(own) for _, own in zip(range(count), positions)]
