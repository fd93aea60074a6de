"""The process that generates a report: ``python -m mindspeed_mm_dit.training.report_worker JOB``, with JOB in JSON."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
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
from mindspeed_mm_dit.configs.source import size_words
from mindspeed_mm_dit.errors import PlatformError
from mindspeed_mm_dit.models.data import with_size
from mindspeed_mm_dit.objectives.guidance import Guidance
from mindspeed_mm_dit.registry import Registry
from mindspeed_mm_dit.sampling.generate import SampleSettings, generate_spread
from mindspeed_mm_dit.sampling.load import describe, load_model
from mindspeed_mm_dit.sampling.outputs import draw_sizes
from mindspeed_mm_dit.sampling.pictures import captioned
from mindspeed_mm_dit.sampling.request import SampleRequest
from mindspeed_mm_dit.terminal import logger
from mindspeed_mm_dit.training.report import Judge, ReportJob

Result = TypeVar("Result")
SAMPLES_PER_CLASS, SAMPLES_SHOWN = 20, 10
"""Samples per class, and how many of them are shown."""
PICTURES = Registry[Callable[[Path, str], Path]]("report_picture")
"""Name -> (folder of the run, its TensorBoard folder) -> the path of the picture that it writes."""
JUDGES = Registry[Callable[[str, Sequence[str]], Judge | None]]("report_judge")
"""Name -> (source of the data, items of the conditions) -> the judge of their samples."""


def draw(job: ReportJob) -> None:
    """Write loss curve and sample grid, score the samples, and print their paths."""
    folder = Path(job.save).parent
    lines = [("checkpoints", job.save)]
    if job.tensorboard_dir:
        lines.append(("TensorBoard", job.tensorboard_dir))
        for name, draw_picture in PICTURES.items():
            if path := _with_packages(name, partial(draw_picture, folder, job.tensorboard_dir)):
                lines.append((name, str(path)))
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
        logger.info(f"note: no {what}: {error.reason}: {error.cure}")
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
    _, config, names, *_ = describe(job.save, None)
    conditions = config.predictor.conditions
    judges = (_with_packages("score", partial(find, job.source or "", conditions.items)) for find in JUDGES.values())
    judge = None if job.frames else next(filter(None, judges), None)
    try:
        model, _ = load_model(job.save, None, bf16=job.bf16)
    except PlatformError as error:
        return f"no samples are generated: {error.what} {error.reason}; mm-dit sample generates them on PyTorch"
    if judge:
        request = SampleRequest(judge.conditions)
    else:
        request = SampleRequest(job.examples | _frames(job)).each(
            SAMPLES_PER_CLASS if conditions.items == ("label",) else 1
        )
    guidance = Guidance(job.cfg_scale, channels="3" if conditions.items == ("label",) else "all")
    settings = SampleSettings(job.sampler, job.steps, guidance, job.seed, bf16=job.bf16)
    displayed = judge.displayed if judge else slice(None)
    parts, lines = [], []
    configs = [with_size(config, tuple(shape)) for shape in job.shapes] or [config]
    for size_config in configs:
        samples = generate_spread(picture, (model, size_config), request, settings)
        assert samples is not None, "the one process of a report has the samples"
        parts.append(samples[displayed])
        prefix = f"{size_words([size_config.sample_size])}: " if job.shapes else ""
        lines += [prefix + judge.score(samples, request.values)] if judge else []
    picture.parent.mkdir(parents=True, exist_ok=True)
    grid = draw_sizes(parts, request.titles(names)[displayed], SAMPLES_SHOWN)
    captioned(grid, f"{settings.words}, {size_words([size_config.sample_size for size_config in configs])}").save(
        picture
    )
    return "\n".join(lines)


if __name__ == "__main__":
    draw(ReportJob(**JOB))
