"""Two frameworks do the same: a network's modules and gradients, the first steps of training, samples."""

from __future__ import annotations

import io
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mindspeed_mm_dit.checkpoint.compatibility import check_names
from mindspeed_mm_dit.configs.model import ModelConfig, load_model_config
from mindspeed_mm_dit.errors import UserError
from mindspeed_mm_dit.objectives.registry import objective_of
from mindspeed_mm_dit.sampling.grid import draw_grid
from mindspeed_mm_dit.verify.examples import draw_inputs, weights_of, write_weights
from mindspeed_mm_dit.verify.first_wrong_module import first_wrong
from mindspeed_mm_dit.verify.processes import OURS, batch_size_of, last_words, own_flags, run_python, run_tasks
from mindspeed_mm_dit.verify.table import Computed, Finding, judge_steps, worst
from mindspeed_mm_dit.verify.task import Taken, Task

INPUTS = 4
"""Samples of the forward pass and the gradients."""
AMPLIFIED = (
    "A high learning rate amplifies rounding from step to step. Compare again with a smaller --lr in the file of "
    "--train-args: rounding then stays within the tolerance, and a fault of the optimizer does not."
)


class Side(NamedTuple):
    """One framework, and where it lives."""

    framework: str
    """"pytorch" or "mindspore"."""
    python: str
    """Interpreter that has it."""
    label: str
    """What the report calls it."""
    script: Path = OURS
    """What its processes run."""

    def take(self, tasks: Sequence[Task], folder: Path) -> list[Taken]:
        """Do ``tasks`` in one process; raises UserError with its last words, or why one of them was refused."""
        why = run_tasks(1, self.framework, tasks, folder, {self.framework: self.python}, self.script)
        found = list(map(Taken.read, tasks))
        for taken in found:
            if not isinstance(taken, Taken):
                log = Path(tasks[0].output).name
                raise UserError(f"{self.label} ({self.python})", taken or why, f"all it said is in {folder}/{log}.log")
        return [taken for taken in found if isinstance(taken, Taken)]


Sides = tuple[Side, Side]


class Samples(NamedTuple):
    """The same images drawn by both sides."""

    images: tuple[bytes, bytes]
    """A PNG of each side's."""
    largest_difference: int
    """Of a pixel, in levels of 0 ... 255."""
    changed: float
    """Part of the pixels that differ at all."""
    how: str
    """Sampler, steps, guidance."""


@dataclass(frozen=True)
class Comparison:
    """All that was compared."""

    labels: tuple[str, str]
    """What the sides are called; the first is the reference."""
    facts: tuple[dict[str, str], dict[str, str]]
    """Versions and device of each."""
    about: dict[str, str]
    """What was compared: model, checkpoint, seed, flags."""
    findings: Sequence[Finding]
    """All quantities."""
    speeds: Sequence[float] = ()
    """Training images per second of each side."""
    samples: Samples | None = None

    @cached_property
    def kinds(self) -> dict[str, list[Finding]]:
        """The quantities of each kind that is judged; inputs only say where an output goes wrong."""
        kinds = ("output", "gradient", "loss")
        found = {kind: [each for each in self.findings if each.kind == kind] for kind in kinds}
        return {kind: own for kind, own in found.items() if own}

    @property
    def checks(self) -> dict[str, Finding]:
        """The worst of each kind."""
        return {kind: worst(found) for kind, found in self.kinds.items()}

    @property
    def good(self) -> bool:
        """The verdict."""
        return all(check.good for check in self.checks.values())

    @property
    def where(self) -> str:
        """The first wrong module in words; empty where none is."""
        return "" if self.checks["output"].good else first_wrong(self.findings)

    @property
    def note(self) -> str:
        """What to make of losses that part while all else agrees."""
        return AMPLIFIED if [kind for kind, check in self.checks.items() if not check.good] == ["loss"] else ""


def judge_pair(ours: Taken, reference: Taken) -> list[Finding]:
    """Judge modules and gradients of one framework by those of another."""
    return judge_steps({**ours.watched, **ours.arrays}, {**reference.watched, **reference.arrays})


def _losses(taken: Taken) -> Computed:
    return {f"loss/{step}": np.array([losses.mean()]) for step, losses in enumerate(taken.losses, 1)}


def compare_sides(
    sides: Sides, folder: Path, *, model: str, checkpoint: str | None, seed: int, steps: int, data: Path,
    train_args: Path, batch_size: int | None, sample_steps: int,
) -> Comparison:  # fmt: skip
    """Run everything, leaving the arrays in ``folder``.

    Args:
        model: path of model.json; checkpoint: where the weights come from; None: they are drawn from ``seed``.
        steps: of training, on ``data`` with the flags in ``train_args``; sample_steps: of the quick sampler; 0: none.
    """
    config, start = load_model_config(model), folder / "weights.safetensors"
    weights = weights_of(config, checkpoint, seed)
    check_names(config.predictor.parameters().shapes(), {name: array.shape for name, array in weights.items()},
                f"--checkpoint = {checkpoint}")  # fmt: skip
    write_weights(start, weights)
    np.savez(folder / "inputs.npz", **draw_inputs(config, seed, INPUTS))  # type: ignore[arg-type]
    flags = training_flags(model, str(data), train_args, steps, seed, batch_size, start if checkpoint else None)
    taken = [_take(side, folder, model, start, steps, flags) for side in sides]
    (first, *trained), (second, *trained_too) = taken
    findings = judge_pair(second, first)
    for ours, reference in zip(trained_too, trained):
        findings += judge_steps(_losses(ours), _losses(reference))
    drawn = (
        f"drawn from seed {seed}; in the forward pass and the gradients, what adaLN-Zero starts at zero is drawn too"
    )
    return Comparison(
        labels=(sides[0].label, sides[1].label), facts=(first.facts, second.facts),
        about={"model": model, "weights": checkpoint or drawn, "training": " ".join(flags) if steps else "none"},
        findings=findings, speeds=[_images_per_second(each, batch_size_of(flags)) for each in (*trained, *trained_too)],
        samples=_sample(sides, folder, config, model, start, seed, sample_steps) if sample_steps else None,
    )  # fmt: skip


def measuring(side: Side, model: str, weights: Path, inputs: Path, output: Path) -> Task:
    """Return the task of looking at the modules of a network, and its gradients, on samples that are given."""
    flags = ("--ai-framework", side.framework, "--mm-model", model, "--init-from", str(weights))
    return Task(flags, str(output), inputs=str(inputs))


def _take(side: Side, folder: Path, model: str, weights: Path, steps: int, flags: Sequence[str]) -> list[Taken]:
    tasks = [measuring(side, model, weights, folder / "inputs.npz", folder / side.label)]
    if steps:
        own = ("--host", "standalone", "--ai-framework", side.framework, *flags)
        tasks.append(Task(own, str(folder / f"{side.label}-trained"), steps, drawn=False))
    _say(f"{side.label}: forward pass and gradients" + (f", {steps} training steps" if steps else ""))
    return side.take(tasks, folder)


def training_flags(
    model: str, data: str, train_args: Path, steps: int, seed: int, batch_size: int | None, start: Path | None
) -> list[str]:
    """Return the flags of a run, equal on both sides: those of ``train_args``, for ``steps`` steps.

    The learning rate follows the schedule of the whole run, of which these are the first steps.
    """
    given = own_flags(train_args) if train_args.is_file() else ["--lr", "1e-4", "--micro-batch-size", "16"]
    if "--lr-decay-iters" not in given and "--train-iters" in given:
        given += ["--lr-decay-iters", given[given.index("--train-iters") + 1]]
    flags = ["--mm-model", model, "--mm-data", data, *given, "--train-iters", str(steps), "--seed", str(seed)]
    if batch_size is not None:
        flags += ["--micro-batch-size", str(batch_size), "--global-batch-size", str(batch_size)]
    return flags if start is None else [*flags, "--init-from", str(start)]


def _images_per_second(taken: Taken, batch_size: int) -> float:
    """Return the median speed over the second half of the steps: the first ones compile and warm up."""
    seconds = taken.arrays["seconds"].tolist()
    return batch_size / statistics.median(seconds[len(seconds) // 2 :])


def _sample(
    sides: Sides, folder: Path, config: ModelConfig, model: str, weights: Path, seed: int, steps: int
) -> Samples:
    """Draw the same images on both sides."""
    sampler = objective_of(config.diffusion).quick_sampler
    scale = 2.0 if config.predictor.conditions.has_null else 1.0
    classes = range(min(4, config.predictor.conditions.label.num_classes))
    flags = ["--checkpoint", str(weights), "--model", model, "--num-per-class", "4"]
    flags += ["--classes", ",".join(map(str, classes)), "--sampler", sampler, "--steps", str(steps)]
    flags += ["--cfg-scale", str(scale), "--seed", str(seed)]
    images = [_drawn(side, folder, flags) for side in sides]
    difference = np.abs(images[0].astype(int) - images[1].astype(int))
    return Samples(
        images=(_png(images[0]), _png(images[1])), largest_difference=int(difference.max()),
        changed=float((difference > 0).mean()), how=f"{sampler}, {steps} steps, guidance scale {scale:g}",
    )  # fmt: skip


def _drawn(side: Side, folder: Path, flags: Sequence[str]) -> np.ndarray:
    """Let ``mm-dit sample`` draw images (N, H, W, C) uint8."""
    _say(f"{side.label}: samples")
    output, log = folder / f"{side.label}_samples.npz", folder / f"{side.label}_samples.log"
    command = ["-m", "mindspeed_mm_dit.cli.main", "sample", *flags, "--ai-framework", side.framework]
    done = run_python(side.python, [*command, "--output", str(output)], log)
    if done.returncode:
        raise UserError(f"{side.label} ({side.python})", last_words(done), f"all it said is in {log}")
    with np.load(output) as file:
        return np.asarray(file["arr_0"])


def _png(images: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    draw_grid(images, [str(number // 4) for number in range(len(images))]).save(buffer, "png")
    return buffer.getvalue()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
