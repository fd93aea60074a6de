"""The process that draws a report: ``python -m mindspeed_mm_dit.training.report_worker JOB``, JOB being JSON."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import numpy as np
from tqdm import tqdm

from mindspeed_mm_dit.framework import activate
from mindspeed_mm_dit.framework.launched import follow_to_death

follow_to_death(signal.SIGTERM)  # a run that is ended leaves nothing behind
JOB = json.loads(sys.argv[1])
activate(JOB["ai_framework"])  # before anything that needs a framework

from mindspeed_mm_dit.data import moving_digits
from mindspeed_mm_dit.errors import PlatformError
from mindspeed_mm_dit.evaluation.digits import score_digits
from mindspeed_mm_dit.evaluation.moving_digits import score_moving_digits
from mindspeed_mm_dit.objectives.guidance import Guidance
from mindspeed_mm_dit.sampling.clips import FPS, save_clips
from mindspeed_mm_dit.sampling.generate import SampleSettings, generate, generate_clips
from mindspeed_mm_dit.sampling.grid import save_samples
from mindspeed_mm_dit.sampling.load import describe, load_model
from mindspeed_mm_dit.training.curves import draw_loss
from mindspeed_mm_dit.training.read_logs import Curve, read_validation
from mindspeed_mm_dit.training.report import ReportJob
from mindspeed_mm_dit.training.scalars import read_scalar

CLASSES_SHOWN = 10
SAMPLES_PER_CLASS = 20
SAMPLES_SHOWN = 10
CLIPS_PER_CAPTION = 3
"""Of the embedded clips' captions, all of which are drawn and scored."""
SHOWN_EVERY = 5
"""Of those clips a strip is shown of every so many, so that digits and directions differ."""


def draw(job: ReportJob) -> None:
    """Draw loss curve and sample grid, score them, and say where everything is."""
    folder = Path(job.save).parent
    lines = [("checkpoints", job.save)]
    if job.tensorboard_dir:
        lines.append(("TensorBoard", job.tensorboard_dir))
        training = Curve("training", *read_scalar(job.tensorboard_dir, "train/loss"))
        draw_loss(folder / "loss.png", training, read_validation(job.tensorboard_dir))
        lines.append(("loss curve", str(folder / "loss.png")))
    picture = folder / "samples.png"
    last = (_draw_clips if describe(job.save, None).config.reads_texts else _draw_images)(job, picture)
    if picture.exists():
        lines.append(("samples", str(picture)))
    for name, place in lines:
        print(f"{name + ':':<13} {place}")
    if last:
        print(last, flush=True)


def _draw_images(job: ReportJob, picture: Path) -> str:
    """Draw a row of samples for each class, and return their score."""
    images, labels = _samples(job)
    save_samples(picture, images, labels, SAMPLES_SHOWN, describe(job.save, None).classes)
    return score_digits(images, labels).line if job.source == "digits" else ""


def _draw_clips(job: ReportJob, picture: Path) -> str:
    """Draw a strip of frames for each caption; where the text encoder cannot run, return how it is done elsewhere."""
    try:
        model, config = load_model(job.save, None, bf16=job.bf16)
    except PlatformError as error:
        return f"no clips are drawn: {error.what} {error.reason}; mm-dit sample draws them on PyTorch"
    settings = SampleSettings(job.sampler, job.steps, Guidance(job.cfg_scale), job.seed, bf16=job.bf16)
    scored = job.source == "moving_digits"
    captions = moving_digits.CAPTIONS * CLIPS_PER_CAPTION if scored else job.captions
    with _bar(settings.steps * len(captions), "clip-step") as bar:
        clips = generate_clips(model, config, captions, settings, bar.update)
    shown = slice(0, len(job.captions) * SHOWN_EVERY, SHOWN_EVERY) if scored else slice(None)
    save_clips(picture, clips[shown], captions[shown], FPS)
    return score_moving_digits(clips[..., 0], captions).line if scored else ""


def _bar(total: int, unit: str) -> tqdm:
    return tqdm(total=total, desc="sampling", unit=unit, file=sys.stderr, disable=not sys.stderr.isatty())


def _samples(job: ReportJob) -> tuple[np.ndarray, np.ndarray]:
    model, config = load_model(job.save, None, bf16=job.bf16)
    classes = np.arange(min(CLASSES_SHOWN, config.num_classes), dtype=np.int64)
    labels = np.repeat(classes, SAMPLES_PER_CLASS)
    settings = SampleSettings(
        sampler=job.sampler,
        steps=job.steps,
        guidance=Guidance(job.cfg_scale if config.predictor.condition.has_null else 1.0, channels="3"),
        seed=job.seed,
        bf16=job.bf16,
    )
    with _bar(settings.steps * len(labels), "image-step") as bar:
        return generate(model, config, labels, settings, bar.update), labels


if __name__ == "__main__":
    draw(ReportJob(**JOB))
