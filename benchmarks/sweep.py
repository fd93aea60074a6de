"""MindSpore against PyTorch on many architectures: outputs, losses and every gradient, below 1e-5 of the norm.

    python benchmarks/sweep.py --mindspore-python .venv-mindspore/bin/python

A few minutes on a CPU. The exit code is 1 if one architecture is past the tolerance.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from datetime import date
from pathlib import Path

from mindspeed_mm_dit.verify.compare import ASKED
from mindspeed_mm_dit.verify.processes import find_sides
from mindspeed_mm_dit.verify.sweep import MODELS, SAMPLES, Agreement, Sweep, sweep

RESULT = Path(__file__).parent / "results" / f"{date.today()}-sweep.md"


def main() -> int:
    """Compare every architecture and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pytorch-python", help="interpreter with PyTorch (default: this one, .venv)")
    parser.add_argument("--mindspore-python", help="interpreter with MindSpore (default: this one, .venv-mindspore)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = sweep(MODELS, find_sides(args.pytorch_python, args.mindspore_python), Path(folder))
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

Tolerance {ASKED.rounding:.0e}; the largest of all is {worst:.1e}.

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
        f"{agreement.gradient.error:.1e} {agreement.gradient.name}",
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    sys.exit(main())
