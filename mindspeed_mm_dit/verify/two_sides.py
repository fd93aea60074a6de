"""Two processes do the same: forward pass and gradients, the first steps of training, samples."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np

from mindspeed_mm_dit.checkpoint.store import find_checkpoint
from mindspeed_mm_dit.configs.model import ModelConfig, load_model_config
from mindspeed_mm_dit.objectives.registry import objective_of
from mindspeed_mm_dit.sampling.grid import draw_grid
from mindspeed_mm_dit.verify.compare import Measured, compare, compare_losses
from mindspeed_mm_dit.verify.page import Comparison, Samples
from mindspeed_mm_dit.verify.processes import Side, Training, batch_size_of, training_flags
from mindspeed_mm_dit.verify.worker import Job, draw_inputs

INPUTS = 4
"""Samples of the forward pass and the gradients."""
WEIGHTS = "weights.safetensors"
Sides = tuple[Side, Side]


def compare_sides(
    sides: Sides, folder: Path, *, model: str, checkpoint: str | None, seed: int, steps: int, data: Path,
    train_args: Path, batch_size: int | None, sample_steps: int,
) -> Comparison:  # fmt: skip
    """Run everything, leaving the arrays in ``folder``.

    Args:
        model: path of model.json; checkpoint: where the weights come from; None: they are drawn from ``seed``.
        steps: of training, on ``data`` with the flags in ``train_args``; sample_steps: of the quick sampler; 0: none.
    """
    config = load_model_config(model)
    measured = _measure(sides, folder, config, model, checkpoint, seed)
    findings = compare(*measured)
    training: list[Training] = []
    start = folder / WEIGHTS if checkpoint else None
    flags = training_flags(model, str(data), train_args, steps, seed, batch_size, start) if steps else []
    for side in sides if steps else ():
        _say(f"{side.label}: {steps} training steps")
        training.append(side.train(flags, folder))
    if training:
        findings["loss"] = compare_losses(*(run.losses for run in training))
    drawn = (
        f"drawn from seed {seed}; in the forward pass and the gradients, what adaLN-Zero starts at zero is drawn too"
    )
    return Comparison(
        labels=(sides[0].label, sides[1].label), facts=(measured[0].facts, measured[1].facts),
        about={"model": model, "weights": checkpoint or drawn, "training": " ".join(flags) or "none"},
        findings=findings, training=training,
        speeds=[run.images_per_second(batch_size_of(flags)) for run in training],
        samples=_sample(sides, folder, config, model, seed, sample_steps) if sample_steps else None,
    )  # fmt: skip


def _measure(
    sides: Sides, folder: Path, config: ModelConfig, model: str, checkpoint: str | None, seed: int
) -> tuple[Measured, Measured]:
    """Run both workers, first the one that can read the checkpoint: it leaves the weights for the other."""
    np.savez(folder / "inputs.npz", **draw_inputs(config, seed, INPUTS))  # type: ignore[arg-type]
    path = find_checkpoint(checkpoint) if checkpoint else None
    of_mindspore = path is not None and (path / "state.ckpt").is_file()
    for side in sorted(sides, key=lambda side: (side.framework == "mindspore") != of_mindspore):
        _say(f"{side.label}: forward pass and gradients")
        job = Job(
            framework=side.framework, model=model, checkpoint=str(path) if path else None,
            weights=str(folder / WEIGHTS), inputs=str(folder / "inputs.npz"),
            output=str(folder / f"{side.label}.npz"), seed=seed,
        )  # fmt: skip
        side.measure([job], folder)
    first, second = (Measured.read(folder / f"{side.label}.npz") for side in sides)
    return first, second


def _sample(sides: Sides, folder: Path, config: ModelConfig, model: str, seed: int, steps: int) -> Samples:
    """Draw the same images on both sides."""
    sampler = objective_of(config.diffusion).quick_sampler
    scale = 2.0 if config.predictor.conditions.has_null else 1.0
    classes = range(min(4, config.predictor.conditions.label.num_classes))
    flags = ["--checkpoint", str(folder / WEIGHTS), "--model", model, "--num-per-class", "4"]
    flags += ["--classes", ",".join(map(str, classes)), "--sampler", sampler, "--steps", str(steps)]
    flags += ["--cfg-scale", str(scale), "--seed", str(seed)]
    images = []
    for side in sides:
        _say(f"{side.label}: samples")
        images.append(side.sample(flags, folder))
    difference = np.abs(images[0].astype(int) - images[1].astype(int))
    return Samples(
        images=(_png(images[0]), _png(images[1])), largest_difference=int(difference.max()),
        changed=float((difference > 0).mean()), how=f"{sampler}, {steps} steps, guidance scale {scale:g}",
    )  # fmt: skip


def _png(images: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    draw_grid(images, [str(number // 4) for number in range(len(images))]).save(buffer, "png")
    return buffer.getvalue()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
