"""The process that draws the report of a run; its argument is a ``training.report.ReportJob`` in JSON."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mindspeed_mm_dit.framework import activate
from mindspeed_mm_dit.framework.exits import die_with_parent, exit_on_sigint

exit_on_sigint()
die_with_parent(signal.SIGTERM)  # a run that is killed leaves no process behind
JOB = json.loads(sys.argv[1])
activate(JOB["ai_framework"])  # before anything that needs a framework

from mindspeed_mm_dit.checkpoint.store import BEST, BEST_TRACKER
from mindspeed_mm_dit.configs.source import format_sizes
from mindspeed_mm_dit.errors import PlatformError
from mindspeed_mm_dit.models.data import with_size
from mindspeed_mm_dit.sampling.conditions import SampleConditions
from mindspeed_mm_dit.sampling.generate import SamplePlan, generate_on_ranks, with_defaults
from mindspeed_mm_dit.sampling.load import describe, load_model
from mindspeed_mm_dit.sampling.outputs import draw_sizes
from mindspeed_mm_dit.sampling.pictures import captioned
from mindspeed_mm_dit.sampling.request import ModelRequest, SampleRequest
from mindspeed_mm_dit.terminal import logger
from mindspeed_mm_dit.tools.evaluate.demo_judges import builtin_judge  # (scores belong to a report)
from mindspeed_mm_dit.tools.visualize.plot import draw_loss_of_run
from mindspeed_mm_dit.training.report import ReportJob

Result = TypeVar("Result")
SAMPLES_PER_CLASS, SAMPLES_SHOWN = 20, 10
"""Samples per class, and how many of them are shown."""


def draw(job: ReportJob) -> None:
    """Write loss curve and sample grid, score the samples, and print their paths."""
    folder = Path(job.save).parent
    lines = [("checkpoints", job.save)]
    if job.tensorboard_dir:
        lines.append(("TensorBoard", job.tensorboard_dir))
        if path := _with_packages("loss curve", partial(draw_loss_of_run, folder, job.tensorboard_dir)):
            lines.append(("loss curve", str(path)))
    picture = folder / "samples.png"
    last = _draw_samples(job, picture)
    if picture.exists():
        lines.append(("samples", str(picture)))
    if (Path(job.save) / BEST_TRACKER).exists():
        lines.append(("best", f"{job.save}/{BEST}"))
    also = {"grids": folder / "samples", "profile": folder / "profile"}
    lines += [(name, str(location)) for name, location in also.items() if location.exists()]
    if "vector" not in job.examples:
        lines.append(("sample more", _next_command(job)))
    for name, location in lines:
        logger.info(f"{name + ':':<14} {location}")
    if last:
        logger.info(last)


def _with_packages(what: str, make: Callable[[], Result]) -> Result | None:
    """Return what ``make`` returns; if a package that it needs is missing, print a note and return None."""
    try:
        return make()
    except PlatformError as error:
        logger.info(f"note: no {what}: {error}")
        return None


def _frames(job: ReportJob) -> dict[str, list[Any]]:
    """Return the first frames of each sample, if the network needs them."""
    if not job.frames:
        return {}
    with np.load(job.frames) as file:
        return {"image": [dict(zip(file, arrays)) for arrays in zip(*file.values())]}


def _next_command(job: ReportJob) -> str:
    """Return the command that generates more samples, with the sampler and the guidance of the report."""
    folder = Path(job.save).parent
    inputs = ["--prompt", job.examples["caption"][0]] if job.examples.get("caption") else []
    inputs += ["--image", "FIRST.png"] if job.frames else []
    how = ["--sampler", job.sampler, "--steps", str(job.steps), "--cfg-scale", f"{job.cfg_scale:g}"]
    return shlex.join(["mm-dit", "sample", "--checkpoint", job.save, *inputs, *how, "--output", f"{folder}/more.png"])


def _draw_samples(job: ReportJob, picture: Path) -> str:
    """Write the picture of samples, and return their score, or what to do if the text encoder cannot run."""
    described = describe(ModelRequest(job.save))
    config = described.config
    conditions = config.predictor.conditions
    judge = None if job.frames else _with_packages("score", partial(builtin_judge, job.source or "", conditions.items))
    try:
        model = load_model(described, bf16=job.bf16)
    except PlatformError as error:
        return f"no samples are generated: {error} mm-dit sample generates them on PyTorch"
    if judge:
        samples = SampleConditions(judge.conditions)
    else:
        each = SAMPLES_PER_CLASS if conditions.items == ("label",) else 1
        samples = SampleConditions(job.examples | _frames(job)).repeat(each)
    request = SampleRequest(sampler=job.sampler, steps=job.steps, guidance=job.cfg_scale, seed=job.seed, bf16=job.bf16)
    request = with_defaults(request, config)
    displayed = judge.displayed if judge else slice(None)
    parts, lines = [], []
    configs = [with_size(config, tuple(shape)) for shape in job.shapes] or [config]
    for size_config in configs:
        images = generate_on_ranks(picture, model, SamplePlan(size_config, request, samples))
        assert images is not None, "the one process of a report has the samples"
        parts.append(images[displayed])
        prefix = f"{format_sizes([size_config.sample_size])}: " if job.shapes else ""
        lines += [prefix + judge.score(images, samples.values)] if judge else []
    picture.parent.mkdir(parents=True, exist_ok=True)
    grid = draw_sizes(parts, samples.titles(described.classes)[displayed], SAMPLES_SHOWN)
    captioned(grid, f"{request.words}, {format_sizes([size_config.sample_size for size_config in configs])}").save(
        picture
    )
    return "\n".join(lines)


if __name__ == "__main__":
    draw(ReportJob(**JOB))
