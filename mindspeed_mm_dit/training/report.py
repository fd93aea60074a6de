"""What a finished run leaves to look at: loss curve, sample grid, score, and where everything is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from mindspeed_mm_dit.checkpoint.store import CheckpointStore
from mindspeed_mm_dit.framework import active, runtime


@dataclass(frozen=True)
class ReportJob:
    """What the drawing process has to know; it travels as JSON."""

    save: str
    tensorboard_dir: str | None
    ai_framework: str
    sampler: str
    steps: int
    cfg_scale: float
    seed: int
    bf16: bool
    scores_digits: bool


def report(args: Namespace) -> None:
    """Draw and print what --report asks for, on the first rank, once training has reached --train-iters.

    In a process of its own: this one has left its job, and MindSpore computes nothing after that.
    """
    if not args.report or not args.save or runtime.rank() != 0:
        return
    saved = CheckpointStore(args.save).iterations()
    if not saved or saved[-1] < args.train_iters:
        how = "the same command" if args.load == args.save else f"--load {args.save}"
        print(f"stopped at iteration {saved[-1] if saved else 0} of {args.train_iters}; {how} resumes")
        return
    job = ReportJob(
        save=args.save,
        tensorboard_dir=args.tensorboard_dir,
        ai_framework=active(),
        sampler=args.report_sampler,
        steps=args.report_steps,
        cfg_scale=args.report_cfg_scale,
        seed=args.seed,
        bf16=args.mm.precision.compute == "bf16" and runtime.SAMPLES_IN_BF16,
        scores_digits=args.mm.data.dataset_param.source == "digits",
    )
    command = [sys.executable, "-m", "mindspeed_mm_dit.training.report_worker", json.dumps(asdict(job))]
    sys.stdout.flush()
    runtime.free_memory()  # the drawing process computes on the same device
    ended = subprocess.run(command, env=_without_launcher(os.environ), check=False)
    if ended.returncode:
        print(
            f"warning: the report could not be drawn (exit code {ended.returncode}, the reason is above). The training "
            f"is complete and saved; draw samples with: mm-dit sample --checkpoint {args.save} --output samples.png",
            file=sys.stderr,
        )


def _without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without what torchrun and msrun tell their processes."""
    told = ("MS_", "TORCHELASTIC_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_")
    return {name: value for name, value in environment.items() if not name.startswith(told)}
