"""What a finished run leaves to look at: loss curve, sample grid, score, and where everything is."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from mindspeed_mm_dit.checkpoint.store import CheckpointStore
from mindspeed_mm_dit.diffusion.guidance import Guidance
from mindspeed_mm_dit.evaluation.curves import draw_loss, read_scalar
from mindspeed_mm_dit.evaluation.digits import digits_accuracy
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.sampling.generate import SampleSettings, generate
from mindspeed_mm_dit.sampling.grid import save_samples
from mindspeed_mm_dit.sampling.load import load_model

CLASSES_SHOWN = 10
SAMPLES_PER_CLASS = 20


def report(args: Namespace) -> None:
    """Draw and print what --report asks for, on the first rank, once training has reached --train-iters."""
    if not args.report or not args.save or runtime.rank() != 0:
        return
    saved = CheckpointStore(args.save).iterations()
    if not saved or saved[-1] < args.train_iters:
        print(f"stopped at iteration {saved[-1] if saved else 0} of {args.train_iters}; the same command resumes")
        return
    folder = Path(args.save).parent
    lines = [("checkpoints", args.save)]
    if args.tensorboard_dir:
        lines.append(("TensorBoard", args.tensorboard_dir))
        curves = [read_scalar(args.tensorboard_dir, name) for name in ("train/loss", "valid/loss")]
        draw_loss(folder / "loss.png", curves[0], curves[1])
        lines.append(("loss curve", str(folder / "loss.png")))
    images, labels = _draw(args)
    save_samples(folder / "samples.png", images, labels)
    lines.append(("sample grid", str(folder / "samples.png")))
    for name, place in lines:
        print(f"{name + ':':<13} {place}")
    if args.mm.data.dataset_param.source == "digits":
        share = digits_accuracy(images, labels)
        print(f"digits score: {share:.1%} of {len(labels)} samples are read as the digit that was asked for")


def _draw(args: Namespace) -> tuple[np.ndarray, np.ndarray]:
    model, config = load_model(args.save, None)
    classes = np.arange(min(CLASSES_SHOWN, config.predictor.num_classes), dtype=np.int64)
    labels = np.repeat(classes, SAMPLES_PER_CLASS)
    has_null_class = config.predictor.class_dropout_prob > 0
    settings = SampleSettings(
        sampler=args.report_sampler,
        steps=args.report_steps,
        guidance=Guidance(args.report_cfg_scale if has_null_class else 1.0, channels="3"),
        seed=args.seed,
    )
    with tqdm(
        total=settings.steps * len(labels),
        desc="sampling",
        unit="image-step",
        file=sys.stderr,
        disable=not sys.stderr.isatty(),
    ) as bar:
        return generate(model, config, labels, settings, bar.update), labels
