"""Compare MindSpore with PyTorch on many architectures: outputs, losses and every gradient, to 1e-5 of the norm.

One model can hide errors in a framework's kernels that another shows: widths that are no multiple of a vector register,
a single token, a single head, tables of one row. The weights are random and nowhere zero, so no error is multiplied by
zero.

    python benchmarks/sweep.py --mindspore-python .venv-mindspore/bin/python

It takes a few minutes on a CPU. The exit code is 1 if an architecture exceeds the tolerance.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np

from mindspeed_mm_dit.configs.autoencoder import AutoencoderKLConfig
from mindspeed_mm_dit.configs.diffusion import GaussianDiffusionConfig
from mindspeed_mm_dit.configs.dit import DiTConfig
from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.tools.verify.compare import Side, Sides, judge_pair, measuring_task
from mindspeed_mm_dit.tools.verify.processes import StepResult, Task, draw_inputs, find_python, write_weights
from mindspeed_mm_dit.tools.verify.table import DEFAULT_TOLERANCES, FORWARD, Finding, judge, worst

RESULT = Path(__file__).parent / "results" / f"{date.today()}-sweep.md"


SAMPLES = 5
"""Samples of each architecture; their timesteps run from one end of the chain to the other."""

_ARCHITECTURES = (
    # size, patch, channels, width, layers, heads, classes, MLP, dropout; prediction, variance, schedule, timesteps
    (8, 1, 3, 24, 2, 3, 3, 4.0, 0.1, "v_prediction", "fixed_small", "squaredcos_cap_v2", 1000),
    (16, 4, 4, 96, 3, 6, 3, 4.0, 0.1, "epsilon", "learned_range", "linear", 1000),
    (8, 8, 1, 64, 2, 4, 10, 4.0, 0.1, "sample", "fixed_large", "linear", 1000),
    (12, 6, 8, 40, 1, 2, 1, 4.0, 0.1, "sample", "learned_range", "squaredcos_cap_v2", 1000),
    (4, 1, 4, 32, 1, 1, 10, 4.0, 0.1, "epsilon", "learned_range", "linear", 1000),
    (9, 3, 4, 60, 2, 5, 7, 4.0, 0.1, "epsilon", "learned_range", "squaredcos_cap_v2", 1000),
    (10, 5, 3, 36, 3, 9, 2, 4.0, 0.0, "v_prediction", "learned_range", "linear", 1000),
    (14, 7, 2, 28, 2, 7, 5, 4.0, 0.1, "epsilon", "fixed_small", "linear", 1000),
    (16, 8, 4, 128, 2, 8, 100, 4.0, 0.1, "epsilon", "learned_range", "linear", 1000),
    (8, 2, 1, 128, 4, 4, 10, 4.0, 0.1, "v_prediction", "fixed_small", "squaredcos_cap_v2", 1000),
    (8, 2, 4, 64, 2, 4, 10, 4.0, 0.1, "epsilon", "learned_range", "linear", 1000),
    (16, 2, 4, 72, 2, 6, 1000, 4.0, 0.1, "epsilon", "learned_range", "linear", 1000),
    (16, 2, 16, 48, 2, 3, 10, 4.0, 0.1, "v_prediction", "learned_range", "squaredcos_cap_v2", 1000),
    (8, 1, 1, 16, 1, 16, 10, 4.0, 0.1, "epsilon", "fixed_large", "squaredcos_cap_v2", 1000),
    (3, 3, 3, 12, 1, 1, 2, 4.0, 0.0, "sample", "fixed_small", "linear", 1000),
    (6, 2, 4, 44, 2, 11, 4, 2.5, 0.1, "epsilon", "learned_range", "linear", 100),
    (8, 4, 4, 192, 2, 3, 10, 1.0, 0.1, "sample", "learned_range", "linear", 1000),
    (8, 2, 4, 100, 3, 5, 6, 3.0, 0.1, "v_prediction", "learned_range", "linear", 4000),
    (12, 3, 1, 52, 1, 13, 9, 4.0, 0.0, "epsilon", "fixed_small", "squaredcos_cap_v2", 250),
    (5, 1, 4, 8, 6, 2, 10, 8.0, 0.1, "epsilon", "learned_range", "squaredcos_cap_v2", 1000),
    (7, 7, 5, 76, 2, 19, 3, 4.0, 0.1, "v_prediction", "fixed_large", "linear", 1000),
    (32, 8, 4, 144, 1, 12, 20, 4.0, 0.1, "epsilon", "learned_range", "linear", 1000),
    (32, 4, 4, 64, 1, 2, 10, 4.0, 0.1, "sample", "fixed_small", "squaredcos_cap_v2", 1000),
    (16, 2, 4, 384, 2, 6, 1000, 4.0, 0.1, "epsilon", "learned_range", "linear", 1000),
    (6, 6, 4, 20, 8, 5, 10, 4.0, 0.1, "epsilon", "learned_range", "linear", 1000),
    (10, 2, 3, 256, 1, 1, 10, 0.5, 0.1, "v_prediction", "learned_range", "squaredcos_cap_v2", 20),
    (8, 4, 4, 4, 1, 1, 1, 4.0, 0.0, "epsilon", "learned_range", "linear", 1000),
    (20, 5, 4, 112, 2, 14, 30, 4.0, 0.1, "epsilon", "fixed_large", "linear", 500),
)  # fmt: skip


def _model(
    size: int, patch: int, channels: int, width: int, layers: int, heads: int, classes: int, mlp: float,
    dropout: float, prediction: str, variance: str, schedule: str, timesteps: int,
) -> ModelConfig:  # fmt: skip
    learned = variance == "learned_range"
    return ModelConfig(
        AutoencoderKLConfig("none: the sweep begins with latents", latent_channels=channels),
        GaussianDiffusionConfig(timesteps, schedule, prediction, variance),  # type: ignore[arg-type]
        DiTConfig(size, classes, channels, patch, width, layers, heads, mlp, dropout, learned),
    )


MODELS = tuple(_model(*row) for row in _ARCHITECTURES)
"""Patches of 1 to 8, both schedules, every prediction and variance."""
FEW_MODELS = MODELS[:4]
"""The first of them: between them both schedules, every prediction and variance, and patches of 1, 4, 6 and 8."""


@dataclass(frozen=True)
class Agreement:
    """How far the second side is from the first on one model."""

    model: ModelConfig
    output: Finding
    """Of the network."""
    loss: Finding
    """Of the sample whose loss is furthest off."""
    gradient: Finding
    """Of the parameter whose gradient is furthest off."""

    @property
    def worst(self) -> Finding:
        """The largest of the three errors."""
        return worst([self.output, self.loss, self.gradient])

    @property
    def good(self) -> bool:
        """Whether all are within the tolerance of ``mm-dit compare``."""
        return self.worst.good


@dataclass(frozen=True)
class Sweep:
    """What a sweep found."""

    facts: tuple[dict[str, str], dict[str, str]]
    """Versions and device of each side."""
    agreements: list[Agreement]
    """One for each model."""

    @property
    def good(self) -> bool:
        """Whether every model agrees."""
        return all(agreement.good for agreement in self.agreements)


def sweep(models: Sequence[ModelConfig], sides: Sides, folder: Path) -> Sweep:
    """Compute every model on both sides, each in one process, leaving the arrays in ``folder``."""
    for number, model in enumerate(models):
        _write_case(folder / str(number), number, model)
    first, second = (
        side.take([_task(folder, number, side) for number in range(len(models))], folder) for side in sides
    )
    return Sweep((first[0].facts, second[0].facts), list(map(_agreement, models, first, second)))


def random_weights(config: DiTConfig, seed: int) -> dict[str, np.ndarray]:
    """Draw all trained weights of a DiT, none of them zero, such that signals keep about their size."""
    draw = np.random.default_rng(seed)
    shapes = parameters_of(config).shapes(trained_only=True)
    return {
        name: draw.standard_normal(shape, np.float32)
        * np.float32(0.7 / math.sqrt(math.prod(shape[1:])) if len(shape) > 1 else 0.02)
        for name, shape in shapes.items()
    }


def _write_case(path: Path, seed: int, model: ModelConfig) -> None:
    """Write model, weights and inputs, which both sides read."""
    Path(f"{path}.json").write_text(json.dumps(dataclasses.asdict(model)), encoding="utf-8")
    write_weights(Path(f"{path}.safetensors"), random_weights(model.predictor, seed))
    np.savez(f"{path}_inputs.npz", **draw_inputs(model, seed, SAMPLES))  # type: ignore[arg-type]


def _task(folder: Path, number: int, side: Side) -> Task:
    model, weights, inputs = (folder / f"{number}{end}" for end in (".json", ".safetensors", "_inputs.npz"))
    return measuring_task(side, str(model), weights, inputs, folder / f"{number}_{side.label}")


def _agreement(model: ModelConfig, first: StepResult, second: StepResult) -> Agreement:
    found = judge_pair(second, first)
    output = next(finding for finding in found if finding.name == "output/")
    losses = zip(second.losses[0], first.losses[0], strict=True)
    by_sample = [judge(f"sample {number}", *pair, FORWARD, DEFAULT_TOLERANCES) for number, pair in enumerate(losses)]
    return Agreement(model, output, worst(by_sample), worst(f for f in found if f.kind == "gradient"))


def main() -> int:
    """Compare every architecture and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pytorch-python", help="interpreter with PyTorch (default: this one, .venv)")
    parser.add_argument("--mindspore-python", help="interpreter with MindSpore (default: this one, .venv-mindspore)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        given = {"pytorch": args.pytorch_python, "mindspore": args.mindspore_python}
        first, second = (Side(name, find_python(name, python), name) for name, python in given.items())
        found = sweep(MODELS, (first, second), Path(folder))
    RESULT.write_text(report(found), encoding="utf-8")
    print(RESULT.read_text(encoding="utf-8"))
    return 0 if found.good else 1


def report(found: Sweep) -> str:
    """Return the result file."""
    rows = "\n".join(map(row, found.agreements))
    worst = max(agreement.worst.error for agreement in found.agreements)
    sides = "\n".join(
        f"- {', '.join(f'{name} {fact}' for name, fact in facts.items() if name != 'system')}" for facts in found.facts
    )
    return f"""# MindSpore against PyTorch, {len(found.agreements)} architectures

    python benchmarks/sweep.py

{date.today()}.

{sides}

Random weights, none of them zero; {SAMPLES} samples, whose timesteps run from the first to the last, one with the null
label where there is one. Each error is the norm of the difference over the norm of PyTorch's: of the output, and the
largest of a sample's loss and of a parameter's gradient. (The bias of queries, keys and values is one parameter:
that of the keys alone has no gradient but rounding.)

Tolerance {DEFAULT_TOLERANCES.rounding:.0e}; the largest of all is {worst:.1e}.

| latents | patch | width | layers, heads | classes | predicts | variance | schedule | output | loss | gradient |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
{rows}
"""


def row(agreement: Agreement) -> str:
    """Return one architecture's line of the table."""
    predictor, diffusion = agreement.model.predictor, agreement.model.diffusion
    cells = [
        f"{predictor.in_channels} x {predictor.input_size}²", predictor.patch_size, predictor.hidden_size,
        f"{predictor.num_layers}, {predictor.num_heads}", predictor.num_classes, diffusion.prediction_type,
        diffusion.variance_type, f"{diffusion.noise_schedule} {diffusion.num_train_timesteps}",
        f"{agreement.output.error:.1e}", f"{agreement.loss.error:.1e}",
        f"{agreement.gradient.error:.1e} {agreement.gradient.which}",
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    sys.exit(main())
