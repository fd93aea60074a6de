"""The report of a finished run: loss curve, sample grid, score, and where everything is."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np

from mindspeed_mm_dit.checkpoint.store import CheckpointStore
from mindspeed_mm_dit.configs.fsdp2 import Precision
from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.framework import active, runtime
from mindspeed_mm_dit.framework.exits import USER_ERROR, without_launch_variables
from mindspeed_mm_dit.objectives.registry import objective_of
from mindspeed_mm_dit.sampling.conditions import read_prompts
from mindspeed_mm_dit.terminal import logger


@dataclass(frozen=True)
class ReportJob:
    """The arguments of the process that samples, passed as JSON."""

    save: str
    tensorboard_dir: str | None
    ai_framework: str
    sampler: str
    steps: int
    cfg_scale: float
    seed: int
    bf16: bool
    source: str | None
    """The built-in data set that it was trained on, which decides how samples are scored."""
    examples: dict[str, list[Any]]
    """The conditions to sample, by item."""
    shapes: list[Sequence[int]]
    """The shapes of the samples; empty: that of the model."""
    frames: str | None = None
    """An .npz of the first frames of the samples, for a network that needs them."""


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
        item: [value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value for value in values]
        for item, values in examples.items()
    }


WORKER = "mindspeed_mm_dit.tools.visualize.report_worker"
"""The program that generates the samples and writes the report; the core alone does not have it."""
SAMPLES = 200
"""Most samples of a report."""


def _computes_in_bf16(args: RunConfig) -> bool:
    precision: Precision | None = args.mm.precision
    return bool(args.bf16) if precision is None else precision.compute == "bf16"  # (None: the host uses the flag)


def report(args: RunConfig) -> None:
    """Write and print the report that --report requests, on the first rank, once training has reached --train-iters.

    ``args.start_iteration``: the iteration that this process started from. No samples are generated if the run was
    complete by then, or if sampling would take longer than the whole training, unless --report requests it. A separate
    process samples, since this one has left its job, and MindSpore computes nothing after that. If it fails, this
    process exits with code 2.
    """
    if not args.report or not args.save or runtime.rank() != 0:
        return
    saved = CheckpointStore(args.save).iterations()
    if not saved or saved[-1] < args.train_iters:
        logger.info(how_to_resume(args, saved[-1] if saved else 0))
        return
    if why := _reason_for_no_samples(args):
        logger.info(f"{why}; {_sample_command(args)} generates samples")
        return
    if importlib.util.find_spec(WORKER.partition(".visualize")[0]) is None:
        logger.info(
            f"note: no report, as this installation is the core alone; {_sample_command(args)} generates samples"
        )
        return
    with NamedTemporaryFile(suffix=".npz") as frames:
        job = _job(args, frames)
        command = [sys.executable, "-m", WORKER, json.dumps(asdict(job))]
        logger.info(f"generating the report's samples: {job.steps} steps of {job.sampler}")
        sys.stdout.flush()
        runtime.free_memory()  # the sampling process computes on the same device
        process = subprocess.run(command, env=without_launch_variables(os.environ), check=False)
    if process.returncode:
        logger.warning(
            f"--report: could not be generated (exit code {process.returncode}, the reason is above). The training is "
            f"complete and saved; generate samples with: {_sample_command(args)}"
        )
        sys.exit(USER_ERROR)


def _job(args: RunConfig, frames: Any) -> ReportJob:
    """Return what to sample; first frames are written to the file ``frames``, if the network needs them."""
    data, predictor = args.mm.data_set, args.mm.model.predictor
    examples = data.examples(prompts_to_sample(args))
    if first_frames := examples.pop("image", None):
        np.savez(frames, **{name: np.stack([frame[name] for frame in first_frames]) for name in first_frames[0]})
        frames.flush()
    return ReportJob(
        save=args.save or "",
        tensorboard_dir=args.parts["tensorboard_dir"],
        ai_framework=active(),
        sampler=args.report_sampler or objective_of(args.mm.model.diffusion).quick_sampler,
        steps=args.report_steps,
        cfg_scale=predictor.cfg_scale(args.report_cfg_scale) if predictor.conditions.has_unconditional else 1.0,
        seed=args.seed,
        bf16=_computes_in_bf16(args) and runtime.CAN_SAMPLE_IN_BF16,
        source=args.mm.data.dataset_param.source,
        examples=_plain(examples),
        shapes=list(data.sampled_shapes()),
        frames=frames.name if first_frames else None,
    )


def _sample_command(args: RunConfig) -> str:
    """Return the command that generates samples of a complete run."""
    prompt = ["--prompt", args.mm.captions[0]] if args.mm.captions else []
    return shlex.join(["mm-dit", "sample", "--checkpoint", str(args.save), *prompt, "--output", "samples.png"])


def _reason_for_no_samples(args: RunConfig) -> str:
    """Return why no samples are generated, or "" if they are.

    A training step costs three forward passes (one forward, two's worth backward). A sample costs at most two per
    step, with guidance.
    """
    if args.start_iteration >= args.train_iters:
        done = f"iteration {args.start_iteration} of {args.train_iters}"
        return f"{done}: the run is complete; a larger --train-iters continues it"
    if args.report != "always" and 3 * args.train_iters * args.global_batch_size < 2 * args.report_steps * SAMPLES:
        return "no samples are generated: that would take longer than the training (add '--report always' for them)"
    return ""


def how_to_resume(args: RunConfig, iteration: int) -> str:
    """Return the last line of a run that stopped at ``iteration``."""
    if not args.save:
        return f"stopped at iteration {iteration} of {args.train_iters}"
    command = "the same command" if args.load == args.save else f"--load {args.save}"
    return f"stopped at iteration {iteration} of {args.train_iters}; {command} resumes"
