"""The report of a finished run: loss curve, sample grid, score, and where everything is."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np

from mindspeed_mm_dit.checkpoint.store import CheckpointStore
from mindspeed_mm_dit.configs.precision import Precision
from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.framework import active, runtime
from mindspeed_mm_dit.framework.exits import USER_ERROR
from mindspeed_mm_dit.framework.launched import without_launcher
from mindspeed_mm_dit.objectives.registry import objective_of
from mindspeed_mm_dit.sampling.request import read_prompts
from mindspeed_mm_dit.terminal import echo_if_open
from mindspeed_mm_dit.training.data_set import open_data_set

Values = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class Judge:
    """Recognises samples of a built-in data set."""

    asked: Values
    """What to sample: for each condition, its value for every sample."""
    shown: slice
    """Which of the samples the picture shows."""
    score: Callable[[np.ndarray, Values], str]
    """(samples, what was asked for) -> a line that tells how many show it."""


@dataclass(frozen=True)
class ReportJob:
    """What the process that draws needs to know; it is passed as JSON."""

    save: str
    tensorboard_dir: str | None
    ai_framework: str
    sampler: str
    steps: int
    cfg_scale: float
    seed: int
    bf16: bool
    source: str | None
    """The built-in data that it learned, by which samples can be scored."""
    examples: dict[str, list[Any]]
    """The conditions to sample, by item."""
    shapes: list[Sequence[int]]
    """The shapes of the samples; empty: the model's own."""
    frames: str | None = None
    """An .npz of what the samples begin with, for a network that needs it."""


def prompts_to_sample(args: RunConfig) -> list[str]:
    """Return the prompts of --sample-prompts; none without it."""
    return (
        []
        if args.sample_prompts is None
        else list(dict.fromkeys(read_prompts("--sample-prompts", args.sample_prompts)))
    )


def _plain(examples: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Return ``examples`` in JSON's types: vectors become lists."""
    return {
        item: [one.tolist() if isinstance(one, (np.ndarray, np.generic)) else one for one in some]
        for item, some in examples.items()
    }


SAMPLES = 200
"""Most samples of a report."""


def _computes_in_bf16(args: RunConfig) -> bool:
    precision: Precision | None = args.mm.precision
    return bool(args.bf16) if precision is None else precision.compute == "bf16"  # (None: the host uses the flag)


def report(args: RunConfig) -> None:
    """Draw and print what --report asks for, on the first rank, once training has reached --train-iters.

    ``args.start_iteration``: the iteration that this process started from. Nothing is drawn if the run was complete by then,
    or if drawing would take longer than the whole training, unless --report asks for it. A separate process draws,
    since this one has left its job, and MindSpore computes nothing after that. If drawing fails, this process exits
    with code 2.
    """
    if not args.report or not args.save or runtime.rank() != 0:
        return
    saved = CheckpointStore(args.save).iterations()
    if not saved or saved[-1] < args.train_iters:
        echo_if_open(how_to_resume(args, saved[-1] if saved else 0))
        return
    if why := _why_nothing(args):
        echo_if_open(f"{why}; {_draws(args)} draws samples")
        return
    with NamedTemporaryFile(suffix=".npz") as frames:
        job = _job(args, frames)
        command = [sys.executable, "-m", "mindspeed_mm_dit.training.report_worker", json.dumps(asdict(job))]
        echo_if_open(f"drawing the report's samples: {job.steps} steps of {job.sampler}")
        sys.stdout.flush()
        runtime.free_memory()  # the drawing process computes on the same device
        ended = subprocess.run(command, env=without_launcher(os.environ), check=False)
    if ended.returncode:
        echo_if_open(
            f"--report: could not be drawn (exit code {ended.returncode}, the reason is above). The training is "
            f"complete and saved; draw samples with: {_draws(args)}",
            file=sys.stderr,
        )
        sys.exit(USER_ERROR)


def _job(args: RunConfig, frames: Any) -> ReportJob:
    """Return what is drawn; what its samples begin with is written to the file ``frames``, if the network needs it."""
    data, predictor = open_data_set(args.mm, args.seed), args.mm.model.predictor
    examples = data.examples(prompts_to_sample(args))
    if adapted_starter := examples.pop("image", None):
        np.savez(frames, **{name: np.stack([own[name] for own in adapted_starter]) for name in adapted_starter[0]})
        frames.flush()
    return ReportJob(
        save=args.save or "",
        tensorboard_dir=args.parts["tensorboard_dir"],
        ai_framework=active(),
        sampler=args.report_sampler or objective_of(args.mm.model.diffusion).quick_sampler,
        steps=args.report_steps,
        cfg_scale=predictor.cfg_scale(args.report_cfg_scale) if predictor.conditions.has_unconditional else 1.0,
        seed=args.seed,
        bf16=_computes_in_bf16(args) and runtime.SAMPLES_IN_BF16,
        source=args.mm.data.dataset_param.source,
        examples=_plain(examples),
        shapes=list(data.shapes_drawn()),
        frames=frames.name if adapted_starter else None,
    )


def _draws(args: RunConfig) -> str:
    """Return the command that draws samples of a complete run."""
    asked = ["--prompt", args.mm.captions[0]] if args.mm.captions else []
    return shlex.join(["mm-dit", "sample", "--checkpoint", str(args.save), *asked, "--output", "samples.png"])


def _why_nothing(args: RunConfig) -> str:
    """Return why nothing is drawn, or "" if something is.

    A training step costs three forward passes (one forward, two's worth backward). A sample costs at most two per
    step, with guidance.
    """
    if args.start_iteration >= args.train_iters:
        return f"iteration {args.start_iteration} of {args.train_iters}: the run is complete; a larger --train-iters goes on"
    if args.report != "always" and 3 * args.train_iters * args.global_batch_size < 2 * args.report_steps * SAMPLES:
        return "nothing is drawn: it would take longer than the training (add '--report always' to draw all the same)"
    return ""


def how_to_resume(args: RunConfig, iteration: int) -> str:
    """Return the last line of a run that stopped at ``iteration``."""
    if not args.save:
        return f"stopped at iteration {iteration} of {args.train_iters}"
    how = "the same command" if args.load == args.save else f"--load {args.save}"
    return f"stopped at iteration {iteration} of {args.train_iters}; {how} resumes"
